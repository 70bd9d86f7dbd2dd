//! `repro`: one model, converted in different surroundings, must give the same bytes every time.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use testkit::digest::sha256_file;

use crate::{Result, build};

const MODEL: &str = "tiny-gemma4-dense";

/// One way to run the same conversion.
struct Case {
    /// Column heading.
    name: &'static str,
    /// What is different, for the legend.
    what: String,
    /// SOURCE as given on the command line.
    source: String,
    threads: u32,
    kernel: Option<&'static str>,
    /// Locale, time zone, home and working folder of somebody else.
    elsewhere: bool,
}

/// Runs every case with every recipe and prints a table of digests. Any difference, or a conversion that fails, is an
/// error.
pub fn run(bin: Option<PathBuf>) -> Result<()> {
    let bin = build::radpack(bin)?;
    let scratch = testkit::target().join("repro");
    build::remove_folder(&scratch)?;
    let cases = cases(&scratch)?;

    println!("{MODEL}, same output in different surroundings:");
    for case in &cases {
        println!("  {:8}  {}", case.name, case.what);
    }
    for (kernel, needs) in missing_kernels() {
        println!("  {kernel:8}  skipped: this machine has no {needs}");
    }
    print!("\n{:22}", "recipe");
    for case in &cases {
        print!("  {:8}", case.name);
    }
    println!("  sha256");

    let mut problems = Vec::new();
    for recipe in &build::recipes(&bin)? {
        let digests: Vec<Result<String>> =
            cases.iter().map(|case| convert(&bin, &scratch, case, recipe)).collect();
        print!("{recipe:22}");
        for digest in &digests {
            print!("  {:8}", digest.as_ref().map_or("failed", |d| &d[..8]));
        }
        println!("  {}", digests[0].as_deref().unwrap_or("-"));
        problems.extend(differences(recipe, &cases, &digests));
    }
    if problems.is_empty() {
        println!("\nall {} outputs of each recipe are the same", cases.len());
        // Kept after a difference, to be compared.
        return build::remove_folder(&scratch);
    }
    Err(format!(
        "not reproducible (outputs in {}):\n  {}",
        scratch.display(),
        problems.join("\n  ")
    ))
}

/// A line for each case whose digest is missing or is not the one of the first case.
fn differences(recipe: &str, cases: &[Case], digests: &[Result<String>]) -> Vec<String> {
    let first = digests.first().and_then(|d| d.as_ref().ok());
    let mut found = Vec::new();
    for (case, digest) in cases.iter().zip(digests) {
        match digest {
            Err(e) => found.push(format!("{recipe}, {}: {e}", case.name)),
            Ok(d) if first.is_some_and(|f| f != d) => {
                let base = cases[0].name;
                found.push(format!("{recipe}, {}: {d} is not the output of {base}", case.name));
            }
            Ok(_) => {}
        }
    }
    found
}

fn cases(scratch: &Path) -> Result<Vec<Case>> {
    let source = testkit::fixtures().join(MODEL);
    let copy = scratch.join("a copy of the model");
    testkit::copy_folder(&source, &copy)?;
    backdate(&copy)?;
    let index = source.join("model.safetensors.index.json");
    let here = source.display().to_string();
    let base = |name, what: &str| Case {
        name,
        what: what.into(),
        source: here.clone(),
        threads: 1,
        kernel: None,
        elsewhere: false,
    };
    let mut cases = vec![
        base("one", "--threads 1"),
        Case { threads: 8, ..base("eight", "--threads 8, another output folder") },
        Case {
            elsewhere: true,
            ..base("abroad", "other TZ, LANG, LC_ALL, HOME and working folder")
        },
        Case {
            source: format!("{}/", copy.display()),
            ..base("copy", "source copied to a path with spaces, given with a slash, older times")
        },
        Case {
            source: index.display().to_string(),
            threads: 3,
            ..base("index", "SOURCE is the index file, --threads 3")
        },
    ];
    for (kernel, _) in KERNELS.iter().filter(|(_, needs)| has(needs)) {
        let what = format!("--kernel {kernel}, --threads 2");
        cases.push(Case { kernel: Some(kernel), threads: 2, ..base(kernel, &what) });
    }
    Ok(cases)
}

/// Kernels with the CPU features each needs.
const KERNELS: [(&str, &[&str]); 3] =
    [("scalar", &[]), ("avx2", &["avx2"]), ("avx512", &["avx512f", "avx512bw"])];

fn missing_kernels() -> Vec<(&'static str, String)> {
    let missing = KERNELS.iter().filter(|(_, needs)| !has(needs));
    missing.map(|(kernel, needs)| (*kernel, needs.join(", "))).collect()
}

/// Whether the CPU has all of these features.
fn has(features: &[&str]) -> bool {
    features.iter().all(|feature| match *feature {
        #[cfg(target_arch = "x86_64")]
        "avx2" => is_x86_feature_detected!("avx2"),
        #[cfg(target_arch = "x86_64")]
        "avx512f" => is_x86_feature_detected!("avx512f"),
        #[cfg(target_arch = "x86_64")]
        "avx512bw" => is_x86_feature_detected!("avx512bw"),
        _ => false,
    })
}

/// Gives every file of a folder a modification time long past.
fn backdate(folder: &Path) -> Result<()> {
    let past = SystemTime::UNIX_EPOCH + Duration::from_secs(981_173_106);
    for entry in fs::read_dir(folder).map_err(testkit::at(folder))? {
        let path = entry.map_err(testkit::at(folder))?.path();
        let file = File::options().write(true).open(&path).map_err(testkit::at(&path))?;
        let times = FileTimes::new().set_accessed(past).set_modified(past);
        file.set_times(times).map_err(testkit::at(&path))?;
    }
    Ok(())
}

/// Converts and returns the sha256 of the output.
fn convert(bin: &Path, scratch: &Path, case: &Case, recipe: &str) -> Result<String> {
    let folder = scratch.join("out").join(case.name);
    fs::create_dir_all(&folder).map_err(testkit::at(&folder))?;
    let out = folder.join(format!("{}.rad", recipe.replace('/', "-")));
    let mut radpack = Command::new(bin);
    radpack.arg("convert").arg(&case.source).arg("-o").arg(&out).args(["--recipe", recipe]);
    radpack.args(["--threads", &case.threads.to_string()]);
    if let Some(kernel) = case.kernel {
        radpack.args(["--kernel", kernel]);
    }
    if case.elsewhere {
        radpack.env("TZ", "Pacific/Kiritimati").env("LANG", "de_DE.UTF-8");
        radpack.env("LC_ALL", "tr_TR.UTF-8").env("HOME", &folder).current_dir(&folder);
    }
    build::output(&mut radpack)?;
    sha256_file(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_different_or_missing_output_is_named() {
        let case = |name| Case {
            name,
            what: String::new(),
            source: String::new(),
            threads: 1,
            kernel: None,
            elsewhere: false,
        };
        let cases = [case("one"), case("eight"), case("copy")];
        let digests = [Ok("aa".to_owned()), Ok("bb".to_owned()), Err("exit 1".to_owned())];
        assert_eq!(
            differences("bf16", &cases, &digests),
            ["bf16, eight: bb is not the output of one", "bf16, copy: exit 1"]
        );
        let same = [Ok("aa".to_owned()), Ok("aa".to_owned()), Ok("aa".to_owned())];
        assert_eq!(differences("bf16", &cases, &same), Vec::<String>::new());
    }

    #[test]
    fn surroundings_differ_in_every_case_that_this_machine_can_run() {
        let scratch = std::env::temp_dir().join(format!("xtask-repro-{}", std::process::id()));
        let cases = cases(&scratch).unwrap();
        build::remove_folder(&scratch).unwrap();
        let names: Vec<&str> = cases.iter().map(|c| c.name).collect();
        assert_eq!(names[..6], ["one", "eight", "abroad", "copy", "index", "scalar"]);
        assert_eq!(names.len() + missing_kernels().len(), 8);
        assert!(cases[3].source.ends_with("a copy of the model/"), "{}", cases[3].source);
        let failed: Vec<Result<String>> = cases.iter().map(|_| Err("exit 3".into())).collect();
        assert_eq!(differences("bf16", &cases, &failed).len(), cases.len());
    }
}
