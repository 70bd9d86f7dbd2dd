//! Model cards: what an artifact is, as the README of a Hugging Face repository.
//!
//! A card is a template over facts. Every fact comes from the artifact, or from a document of `radpack eval` or `radpack
//! estimate-kv` that the caller hands in; what is not known is absent, and the built-in template leaves its part out.
//! Templates are minijinja with strict variables and fuel: they read no file, and they end.

mod command;
mod facts;
mod report;
mod serving;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value};
use serde_json::{Value as Json, json};

use crate::artifact::Artifact;
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};

pub use facts::facts;

/// The built-in template; `radpack card --template` takes another one.
pub const TEMPLATE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/cards/model.md.jinja"));

/// The page of [`report`].
const REPORT: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/cards/report.html.jinja"));

/// Steps that a template may take; the built-in one takes some thousand for a model of a hundred programs.
const FUEL: u64 = 10_000_000;

/// What the artifact itself cannot say.
#[derive(Debug, Clone, Default)]
pub struct Additions {
    /// Heading; absent, the file's name without its extension.
    pub title: Option<String>,
    /// License as the hub spells it, e.g. `apache-2.0`; absent, that of the source's README.
    pub license: Option<String>,
    /// Repository that the weights were made from; absent, that of the artifact's source.
    pub base_model: Option<String>,
    /// Documents of `radpack eval --json`.
    pub evals: Vec<Json>,
    /// A document of `radpack estimate-kv --json`.
    pub estimate: Option<Json>,
    /// Name of the file, as readers will see it.
    pub file_name: String,
    /// SHA-256 of the file in hex.
    pub sha256: String,
}

impl Additions {
    /// Whether the documents are what they should be, and of this artifact.
    ///
    /// # Errors
    /// Documents of another command or of another artifact ([`FailureKind::Usage`]), all of them at once.
    pub fn check(&self, artifact: &Artifact) -> Result<()> {
        let mut problems = Problems::new();
        let own = artifact.meta_text(crate::artifact::layout::DIGEST_KEY).map(|t| t.to_string());
        let mut of = |what: &str, document: &Json, schema: &str| {
            let found = document["schema"].as_str();
            if found != Some(schema) {
                let said = found.unwrap_or("none");
                let say = format!("{what}: its `schema` is {said}, {schema} is needed");
                problems.push(
                    Diagnostic::new("card", say)
                        .help(format!("{what} takes what radpack prints with --json")),
                );
                return;
            }
            if let (Some(own), Some(other)) = (own.as_deref(), document["digest"].as_str())
                && own != other
            {
                let say = format!(
                    "{what} is of the artifact {}…, this one is {}…",
                    short(other),
                    short(own)
                );
                problems.push(
                    Diagnostic::new("card", say)
                        .help("measure this file, or leave the document out"),
                );
            }
        };
        self.evals.iter().for_each(|document| of("--eval", document, "radpack.eval"));
        self.estimate.iter().for_each(|document| of("--estimate", document, "radpack.estimate"));
        problems.finish(FailureKind::Usage, "these documents do not belong on the card", ())
    }
}

fn short(digest: &str) -> String {
    digest.chars().take(12).collect()
}

/// The card of an artifact: the facts through a template of that name.
///
/// # Errors
/// An artifact without a manifest ([`FailureKind::Refused`]), documents that do not fit ([`Additions::check`]), a template
/// that is malformed, names a fact that there is not, or does not end ([`FailureKind::Usage`]).
pub fn card(
    artifact: &Artifact,
    additions: &Additions,
    name: &str,
    template: &str,
) -> Result<String> {
    additions.check(artifact)?;
    let facts = facts(artifact, additions)?;
    render(&facts, name, template)
}

/// The failure of a template that gave no card for that reason.
pub fn refused(why: &str) -> Failure {
    let problem = Diagnostic::new("card", why).help(
        "the built-in template is recipes/cards/model.md.jinja; `radpack card --facts` prints what a template can name",
    );
    Failure::one(FailureKind::Usage, "the card's template cannot be used", problem)
}

/// A page that shows an artifact in a browser: one HTML file that loads nothing.
///
/// # Errors
/// As [`facts()`]; weights that cannot be put together ([`FailureKind::Invalid`]).
pub fn report(artifact: &Artifact, additions: &Additions) -> Result<String> {
    let facts = report::facts(artifact, additions)?;
    render(&facts, "report.html.jinja", REPORT)
}

fn render(facts: &Json, name: &str, template: &str) -> Result<String> {
    rendered(facts, name, template).map_err(|why| refused(&why))
}

/// A template of that name over facts, or why there is no text; values are escaped where the name says HTML. What
/// [`crate::runtime::Chat`] says of its time and memory holds here too.
///
/// # Errors
/// As [`card`], for the template.
pub fn rendered(facts: &Json, name: &str, template: &str) -> std::result::Result<String, String> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|e| e.to_string())?);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|name| match name.contains(".html") {
        true => AutoEscape::Html,
        false => AutoEscape::None,
    });
    environment.add_filter("size", |bytes: u64| diag::size(bytes));
    environment.add_filter("count", |n: u64| diag::count(n));
    // Text from files must not break a table or open a tag.
    environment.add_filter("cell", |text: String| {
        text.replace('\\', "\\\\")
            .replace('|', "\\|")
            .replace('<', "&lt;")
            .replace(['\n', '\r'], " ")
    });
    // Front matter is YAML, of which JSON's strings are a part.
    environment.add_filter("yaml", |text: String| json!(text).to_string());
    environment.add_filter("fixed", |x: f64, digits: usize| format!("{x:.digits$}"));
    environment.add_filter("scientific", |x: f64| format!("{x:.1e}"));
    // Share of a whole in percent, for the width of a bar.
    environment.add_filter("percent", |part: f64, whole: f64| {
        format!("{:.3}", if whole > 0.0 { (part / whole * 100.0).clamp(0.0, 100.0) } else { 0.0 })
    });
    let rendered = environment
        .template_from_named_str(name, template)
        .and_then(|t| t.render(Value::from(Serde(facts))));
    // A card is a text file: one line feed ends it.
    let ended = |text: String| format!("{}\n", text.trim_end());
    rendered.map(ended).map_err(|error| {
        let mut what = format!("{name}: {error}");
        if let Some(source) = std::error::Error::source(&error) {
            what.push_str(&format!(": {source}"));
        }
        what
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(template: &str) -> String {
        let failure = render(&json!({"a": 1, "t": "x|y<b>\n"}), "t", template).expect_err(template);
        assert_eq!(failure.kind, FailureKind::Usage);
        failure.problems[0].message.clone()
    }

    #[test]
    fn templates_that_name_unknown_facts_or_files_or_run_forever_are_refused() {
        assert!(said("{{ b }}").contains("undefined"), "{}", said("{{ b }}"));
        assert!(said("{% if %}").contains("t:1"), "{}", said("{% if %}"));
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
        assert!(said(endless).contains("fuel"), "{}", said(endless));
        assert!(said("{% include '/etc/passwd' %}").contains("include"));
    }

    #[test]
    fn pages_escape_what_files_say_and_bars_stay_inside() {
        let facts = json!({"t": "<b>&\"", "n": 3, "of": 2});
        let text = render(&facts, "x.html.jinja", "{{ t }} {{ n|percent(of) }} {{ 1|percent(0) }}");
        assert_eq!(text.expect("renders"), "&lt;b&gt;&amp;&quot; 100.000 0.000\n");
    }

    #[test]
    fn text_of_files_opens_no_tag_and_breaks_no_table() {
        let facts = json!({"t": "x|y<b>\nz\\", "n": 1536, "x": 0.00123});
        let text = render(&facts, "t", "{{ t|cell }} {{ t|yaml }} {{ n|size }} {{ x|scientific }}")
            .expect("renders");
        assert_eq!(text, "x\\|y&lt;b> z\\\\ \"x|y<b>\\nz\\\\\" 1.50 KiB 1.2e-3\n");
    }
}
