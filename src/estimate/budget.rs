//! How much of a device's memory may be used, as optimum-rbln 0.11.1 and later read `memory_budget`.

use crate::diag::{Diagnostic, Failure, FailureKind, Result, count};
use crate::recipe::MemoryBudget;

const WAYS: &str = "a fraction with a point above 0 and at most 1 (0.9), a percentage (90%), or whole bytes (15000000000, 12GB, 512 MiB)";

/// Units, all of them binary as in optimum-rbln.
const UNITS: [(&str, u64); 9] = [
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
    ("KB", 1 << 10),
    ("MB", 1 << 20),
    ("GB", 1 << 30),
    ("TB", 1 << 40),
    ("B", 1),
];

/// Reads a budget: `0.9` and `90%` are fractions, a whole number is bytes (`1` is one byte, `1.0` everything), and a
/// whole number with a unit is bytes in binary units, whatever its case.
///
/// # Errors
/// [`FailureKind::Usage`] for fractions outside (0, 1], sizes that are not whole or not above 0, and other text.
pub fn parse(text: &str) -> Result<MemoryBudget> {
    let refuse = |rule: String| {
        let problem = Diagnostic::new("estimate", rule).help(format!("give {WAYS}"));
        Err(Failure::one(FailureKind::Usage, "this memory budget cannot be read", problem))
    };
    let said = text.trim();
    let fraction = match said.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().ok().map(|p| p / 100.0),
        None if said.contains('.') || said.contains(['e', 'E']) => said.parse::<f64>().ok(),
        None => None,
    };
    if let Some(fraction) = fraction {
        if fraction > 0.0 && fraction <= 1.0 {
            return Ok(MemoryBudget::Fraction(fraction));
        }
        return refuse(format!("a fraction of the memory is above 0 and at most 1, not {said}"));
    }
    let upper = said.to_ascii_uppercase();
    let unit = UNITS.iter().find(|(unit, _)| upper.ends_with(unit));
    let (digits, factor) = match unit {
        Some((unit, factor)) => (upper.strip_suffix(unit).unwrap_or(&upper).trim_end(), *factor),
        None => (upper.as_str(), 1),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return refuse(format!("\"{said}\" is no memory budget"));
    }
    match digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor)) {
        Some(0) => refuse("a memory budget is above 0".to_owned()),
        Some(bytes) => Ok(MemoryBudget::Bytes(bytes)),
        None => refuse(format!("{said} passes 64 bits")),
    }
}

/// Bytes that a budget allows of `usable` ones: a fraction rounds down.
///
/// # Errors
/// [`FailureKind::Refused`] when the budget passes what there is.
pub fn resolve(budget: Option<MemoryBudget>, usable: u64) -> Result<u64> {
    match budget {
        None => Ok(usable),
        // The product of a fraction of at most 1 fits.
        Some(MemoryBudget::Fraction(f)) => Ok(((usable as f64 * f) as u64).min(usable)),
        Some(MemoryBudget::Bytes(bytes)) if bytes <= usable => Ok(bytes),
        Some(MemoryBudget::Bytes(bytes)) => {
            let rule = format!(
                "a memory budget of {} B passes the {} B that a device has to use",
                count(bytes),
                count(usable)
            );
            let problem = Diagnostic::new("estimate", rule)
                .help(format!("use up to {usable}B, or a fraction such as 0.9"));
            Err(Failure::one(FailureKind::Refused, "this memory budget does not fit", problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_read_as_optimum_rbln_reads_them() {
        let read = |text: &str| parse(text).ok();
        assert_eq!(read("0.9"), Some(MemoryBudget::Fraction(0.9)));
        assert_eq!(read("1.0"), Some(MemoryBudget::Fraction(1.0)));
        assert_eq!(read("90%"), Some(MemoryBudget::Fraction(0.9)));
        assert_eq!(read(" 12.5 % "), Some(MemoryBudget::Fraction(0.125)));
        // A whole number without a unit is bytes: 1 is one byte.
        assert_eq!(read("1"), Some(MemoryBudget::Bytes(1)));
        assert_eq!(read("1000b"), Some(MemoryBudget::Bytes(1000)));
        // Units are binary, whatever they are called.
        for text in ["12GB", "12 gb", "12GiB", "12288MB"] {
            assert_eq!(read(text), Some(MemoryBudget::Bytes(12 << 30)), "{text}");
        }
        assert_eq!(read("1TB"), Some(MemoryBudget::Bytes(1 << 40)));
        for text in
            ["0.0", "1.01", "-0.5", "101%", "0%", "1.5GB", "0", "0GB", "", "GB", "True", "nan%"]
        {
            let failure = parse(text).expect_err(text);
            assert_eq!(failure.kind, FailureKind::Usage, "{text}");
            assert!(failure.problems.iter().all(|p| !p.help.is_empty()), "{text}");
        }
    }

    #[test]
    fn a_budget_is_a_part_of_what_is_usable_and_never_more() {
        // optimum-rbln 0.11.2 on RBLN-CA25: int(16,877,879,296 × 0.9).
        let usable = 16_877_879_296;
        let get = |budget| resolve(budget, usable).ok();
        assert_eq!(get(Some(MemoryBudget::Fraction(0.9))), Some(15_190_091_366));
        assert_eq!(get(None), Some(usable));
        assert_eq!(get(Some(MemoryBudget::Fraction(1.0))), Some(usable));
        assert_eq!(get(Some(MemoryBudget::Bytes(usable))), Some(usable));
        let failure = resolve(Some(MemoryBudget::Bytes(usable + 1)), usable).expect_err("too much");
        assert_eq!(failure.kind, FailureKind::Refused);
    }
}
