//! Which instruction set encodes. All of them give the same bytes and the same error sums; tests hold that.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::diag;

use super::lanes::Ops;

/// A set of encoding kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// The widest that this machine has, else what the build's own target gives.
    Auto,
    /// The reference arithmetic, element by element.
    Scalar,
    /// Arrays of lanes, compiled for the build's own target.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

const ALL: [Kernel; 5] =
    [Kernel::Auto, Kernel::Scalar, Kernel::Portable, Kernel::Avx2, Kernel::Avx512];

/// Why a kernel was not selected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// No kernel of that name.
    #[error("no kernel is called `{name}`; there are {}", diag::list(&ALL, ALL.len()))]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The processor lacks its instructions.
    #[error("this processor has no {kernel}; available are {}", diag::list(&Kernel::available(), ALL.len()))]
    Missing {
        /// What was asked for.
        kernel: Kernel,
    },
}

impl Kernel {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Auto => "auto",
            Kernel::Scalar => "scalar",
            Kernel::Portable => "portable",
            Kernel::Avx2 => "avx2",
            Kernel::Avx512 => "avx512",
        }
    }

    /// Every kernel this machine can run, without [`Kernel::Auto`]; the widest last.
    pub fn available() -> Vec<Kernel> {
        ALL.into_iter().filter(|k| *k != Kernel::Auto && k.runs()).collect()
    }

    fn runs(self) -> bool {
        match self {
            Kernel::Auto | Kernel::Scalar | Kernel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => super::simd::Avx2::runs(),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => super::simd::Avx512::runs(),
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx2 | Kernel::Avx512 => false,
        }
    }

    /// The kernel itself: [`Kernel::Auto`], and one this machine cannot run, become the widest that it can.
    pub(super) fn resolve(self) -> Kernel {
        if self != Kernel::Auto && self.runs() {
            return self;
        }
        let widest = [Kernel::Avx512, Kernel::Avx2].into_iter().find(|k| k.runs());
        widest.unwrap_or(Kernel::Portable)
    }

    /// The vector functions; `None` for the reference.
    pub(super) fn ops(self) -> Option<&'static Ops> {
        match self.resolve() {
            Kernel::Auto | Kernel::Scalar => None,
            Kernel::Portable => Some(&super::lanes::portable::OPS),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => Some(&super::lanes::avx2::OPS),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => Some(&super::lanes::avx512::OPS),
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx2 | Kernel::Avx512 => None,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Position in `ALL`; 0 is `Auto`.
static SELECTED: AtomicU8 = AtomicU8::new(0);

/// Selects the kernel of every encoder made from now on: `auto`, `scalar`, `portable`, `avx2` or `avx512`.
///
/// # Errors
/// An unknown name, or a kernel this processor cannot run.
pub fn select(name: &str) -> Result<Kernel, KernelError> {
    let Some(at) = ALL.iter().position(|k| k.name() == name) else {
        return Err(KernelError::Unknown { name: name.to_owned() });
    };
    if !ALL[at].runs() {
        return Err(KernelError::Missing { kernel: ALL[at] });
    }
    SELECTED.store(at as u8, Ordering::Relaxed);
    Ok(ALL[at])
}

/// The kernel that new encoders use; never [`Kernel::Auto`].
pub fn selected() -> Kernel {
    ALL[usize::from(SELECTED.load(Ordering::Relaxed)) % ALL.len()].resolve()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kernel_is_refused_with_the_names_that_exist() {
        let error = select("sse9").expect_err("unknown");
        assert_eq!(
            error.to_string(),
            "no kernel is called `sse9`; there are auto, scalar, portable, avx2 and avx512"
        );
    }

    #[test]
    fn auto_is_the_widest_that_runs() {
        let available = Kernel::available();
        assert_eq!(available[..2], [Kernel::Scalar, Kernel::Portable]);
        assert_eq!(Some(&Kernel::Auto.resolve()), available.last());
        assert_eq!(select("auto"), Ok(Kernel::Auto));
        assert!(available.contains(&selected()));
    }
}
