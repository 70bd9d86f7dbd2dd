//! Rules about the text of a file, comments included.

use super::Source;

/// The most lines of a Rust file.
const MAX_LINES: usize = 800;

// Put together from halves, so that this file passes its own rules.
const LATER: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const BESIDE: &str = concat!("..", "/shared");
const MACHINE: &str = concat!("/wo", "rk");

/// Checks one file, line by line.
pub fn check(source: &Source, report: &mut impl FnMut(usize, &'static str, String)) {
    let rust = source.path.ends_with(".rs");
    let lines = source.text.lines().count();
    if rust && lines > MAX_LINES {
        report(lines, "length", format!("{lines} lines; {MAX_LINES} is the most"));
    }
    if rust && !source.text.starts_with("//!") {
        report(1, "module-doc", "the file doesn't open with //!".into());
    }
    // Fixtures are data made elsewhere; a vocabulary may hold any word.
    let prose = !source.path.starts_with("fixtures/");
    for (i, line) in source.text.lines().enumerate() {
        if line.contains(BESIDE) || has_path(line, MACHINE) {
            report(i + 1, "wording", "a path of one developer's machine".into());
        }
        for word in LATER.into_iter().filter(|w| prose && has_word(line, w)) {
            report(i + 1, "unfinished", word.into());
        }
    }
}

/// Whether a line names the absolute path `root` or one below it.
fn has_path(line: &str, root: &str) -> bool {
    line.match_indices(root).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + root.len()..].chars().next();
        let inside = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        // `a/b`, `../b` and `}/b` are other paths' ends.
        !before.is_some_and(|c| inside(c) || matches!(c, '}' | ')' | '*'))
            && !after.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-'))
    })
}

/// Whether a word stands alone in a line.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !inside(before) && !inside(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_whole_and_not_inside_another() {
        let w = MACHINE;
        assert!(has_path(&format!("see `{w}/x`"), w));
        assert!(has_path(&format!("cd {w}"), w));
        assert!(!has_path(&format!(".github{w}flows"), w));
        assert!(!has_path(&format!("frame{}/x", &w[1..]), w));
        assert!(!has_path(&format!("a{w}/x"), w));
        assert!(!has_path(&format!("{w}space"), w));
    }
}
