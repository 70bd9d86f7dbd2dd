//! Renderings of diagnostics for people. Colour only adds; the words carry the meaning.

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

use super::{Diagnostic, Failure};

/// How to render.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Whether ANSI colour codes may be used.
    pub colour: bool,
}

impl Style {
    /// No colour.
    pub fn plain() -> Style {
        Style { colour: false }
    }

    fn bold(self, text: &str) -> String {
        if self.colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn red(self, text: &str) -> String {
        if self.colour { format!("\x1b[1;31m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn yellow(self, text: &str) -> String {
        if self.colour { format!("\x1b[1;33m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A failure with all its problems, ending in a newline.
pub fn render_failure(failure: &Failure, style: Style) -> String {
    let code = failure.kind.exit_code();
    let mut out = format!("{} {}", style.red("error:"), style.bold(&failure.headline));
    out.push_str(&format!("  [exit {code}]\n"));
    if !failure.problems.is_empty() {
        out.push('\n');
        for problem in &failure.problems {
            out.push_str(&render_problem(problem, style));
        }
        let n = failure.problems.len();
        let noun = if n == 1 { "problem" } else { "problems" };
        out.push_str(&format!("\n{n} {noun}"));
        if let Some(closing) = &failure.closing {
            out.push_str(&format!("; {closing}"));
        }
        out.push('\n');
    } else if let Some(closing) = &failure.closing {
        out.push_str(&format!("{closing}\n"));
    }
    out
}

/// A problem that did not stop the run, ending in a newline.
pub fn render_warning(problem: &Diagnostic, style: Style) -> String {
    let head = format!("{} {}: ", style.yellow("warning:"), problem.area);
    let shown = "warning: ".len() + problem.area.chars().count() + 2;
    head + &details(problem, shown, style)
}

fn render_problem(problem: &Diagnostic, style: Style) -> String {
    let head = format!("  {}: ", style.bold(problem.area));
    head + &details(problem, problem.area.chars().count() + 4, style)
}

/// Message, place and help, after a head of `shown` columns.
fn details(problem: &Diagnostic, shown: usize, style: Style) -> String {
    let mut out = wrapped(&problem.message, shown, 4);
    if let Some(label) = &problem.label {
        out.push_str(&indent(&snippet(label, style), 4));
    }
    for line in &problem.help {
        out.push_str("    = ");
        out.push_str(&wrapped(line, 6, 6));
    }
    out
}

/// Columns that output keeps to where words allow.
const WIDTH: usize = 100;

/// Text broken at blanks so that lines end before [`WIDTH`]: the first starts after `used` columns, the others are
/// indented. A word that is longer than a line stands alone. Ends in a newline.
fn wrapped(text: &str, used: usize, indent: usize) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let (mut column, mut first) = (used, true);
    for word in text.split(' ') {
        let width = word.chars().count();
        if !first && column + 1 + width > WIDTH {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if !first {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += width;
        first = false;
    }
    out.push('\n');
    out
}

/// The marked line with its place, drawn by annotate-snippets; its own title line is dropped because the problem's
/// message stands above already.
fn snippet(label: &super::Label, style: Style) -> String {
    let renderer = if style.colour { Renderer::styled() } else { Renderer::plain() };
    let renderer = renderer.term_width(WIDTH - 4);
    let text = &label.source.text;
    let start = floor_char_boundary(text, label.span.start.min(text.len()));
    let end = floor_char_boundary(text, label.span.end.clamp(start, text.len()));
    let group = Level::ERROR.primary_title("").element(
        Snippet::source(text)
            .path(&label.source.name)
            .annotation(AnnotationKind::Primary.span(start..end).label(&label.text)),
    );
    let drawn = renderer.render(&[group]);
    drawn.split_once('\n').map_or(String::new(), |(_, rest)| format!("{rest}\n"))
}

fn floor_char_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn indent(text: &str, by: usize) -> String {
    let pad = " ".repeat(by);
    text.lines().map(|l| format!("{pad}{l}").trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::diag::{FailureKind, SourceText};

    #[test]
    fn a_failure_shows_rule_place_and_way_out() {
        let source = Arc::new(SourceText {
            name: "mine.toml".into(),
            text: "schema = 1\nimage = [384, 640]\n".into(),
        });
        let problem = Diagnostic::new("buckets", "640 serves no max_soft_tokens value")
            .at(&source, 25..28, "never the smallest bucket that fits")
            .help("drop 640");
        let mut failure = Failure::one(FailureKind::Refused, "this model does not fit", problem);
        failure.closing = Some("nothing was written".into());
        insta::assert_snapshot!(render_failure(&failure, Style::plain()), @r"
        error: this model does not fit  [exit 3]

          buckets: 640 serves no max_soft_tokens value
             --> mine.toml:2:15
              |
            2 | image = [384, 640]
              |               ^^^ never the smallest bucket that fits
            = drop 640

        1 problem; nothing was written
        ");
    }

    #[test]
    fn long_lines_break_at_blanks_and_warnings_show_their_place() {
        let source =
            Arc::new(SourceText { name: "mine.toml".into(), text: "match = \"re:a.b\"\n".into() });
        let problem = Diagnostic::new("recipe", "word ".repeat(25).trim_end())
            .at(&source, 8..16, "here")
            .help("value, ".repeat(20).trim_end())
            .help("x".repeat(120));
        let text = render_warning(&problem, Style::plain());
        insta::assert_snapshot!(text, @r#"
    warning: recipe: word word word word word word word word word word word word word word word word
        word word word word word word word word word
         --> mine.toml:1:9
          |
        1 | match = "re:a.b"
          |         ^^^^^^^^ here
        = value, value, value, value, value, value, value, value, value, value, value, value, value,
          value, value, value, value, value, value, value,
        = xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
    "#);
        assert!(text.lines().all(|line| line.len() <= WIDTH || line.contains("xxx")), "{text}");
    }

    #[test]
    fn a_span_outside_the_text_or_inside_a_character_is_drawn_at_the_nearest_place() {
        let source = Arc::new(SourceText { name: "x".into(), text: "é".into() });
        let problem = Diagnostic::new("recipe", "m").at(&source, 1..99, "here");
        let failure = Failure::one(FailureKind::Usage, "h", problem);
        assert!(render_failure(&failure, Style::plain()).contains("here"));
    }
}
