//! What the arguments mean: sources, recipes, threads, kernels.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use radpack::checkpoint::{Checkpoint, Extent, OpenOptions};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result};
use radpack::pipeline::{Imatrix, Sources};
use radpack::quantize::kernel;
use radpack::recipe::{self, Recipe};

use super::args::{Common, KernelChoice, RecipeArgs};

/// Opens a source: folder, file, index or hub id.
pub fn source(text: &str, extent: Extent) -> Result<Checkpoint> {
    let on_transfer = Some(super::progress::downloads());
    Checkpoint::open(Path::new(text), &OpenOptions { extent, on_transfer, hub: None })
}

/// Opens a source and, if they are named, its draft model and importances.
pub fn sources(
    main: &str,
    draft: Option<&str>,
    imatrix: Option<&Path>,
    extent: Extent,
) -> Result<Sources> {
    let main = source(main, extent)?;
    let draft = draft.map(|draft| source(draft, extent)).transpose().map_err(|mut failure| {
        failure.headline = format!("the draft model: {}", failure.headline);
        failure
    })?;
    let imatrix = imatrix.map(Imatrix::open).transpose()?;
    Ok(Sources { main, draft, imatrix })
}

/// Loads a recipe by name or path and applies what overwrites its values, `more` last.
pub fn recipe(args: &RecipeArgs, more: &[String]) -> Result<Recipe> {
    let mut sets = args.sets.clone();
    sets.extend(args.devices.map(|n| format!("target.devices={n}")));
    sets.extend(args.target.iter().map(|name| format!("target.profile={name}")));
    sets.extend_from_slice(more);
    let mut recipe = recipe::load(args.recipe.as_deref())?;
    recipe.set_all(&sets)?;
    Ok(recipe)
}

/// Worker threads, at least one.
pub fn threads(common: &Common) -> usize {
    threads_of(common.threads)
}

/// Worker threads, at least one; 0 is one per core.
pub fn threads_of(asked: usize) -> usize {
    match asked {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

/// That many threads for a run.
pub fn pool(threads: usize) -> Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map_err(|e| Failure::plain(FailureKind::Failed, format!("cannot start threads: {e}")))
}

/// Bytes of decoded weights that a run may keep: half of what Linux says is free, else 4 GiB.
pub fn memory() -> u64 {
    let free = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    });
    free.map_or(4 << 30, |kib| kib.saturating_mul(512))
}

/// Selects the kernels for this process.
pub fn kernel(choice: KernelChoice) -> Result<()> {
    kernel::select(choice.name()).map(|_| ()).map_err(|error| {
        let problem = Diagnostic::new("kernel", error.to_string()).help("--kernel auto");
        Failure::one(FailureKind::Usage, "this machine cannot run the kernel", problem)
    })
}

/// Set when the process was asked to stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM end the run cleanly: workers stop, the partial file goes, an older output stays.
/// Returns the flag that they set.
pub fn stop_on_signals() -> &'static AtomicBool {
    extern "C" fn stop(signal: libc::c_int) {
        STOP.store(true, Ordering::Relaxed);
        // SAFETY: `signal` is async-signal-safe. A second signal ends the process at once, as people expect.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let handler = stop as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic and calls `signal`, both async-signal-safe.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    &STOP
}
