//! `radpack recipes`

use std::process::ExitCode;

use radpack::diag::{Failure, FailureKind, Result, SourceText};
use radpack::recipe::{self, Recipe};

use super::args::{Recipes, RecipesAction};
use super::documents::{RecipeDocument, RecipesDocument};
use super::output::Output;
use super::table::{Align, table};

/// Lists, shows, checks or imports recipes.
pub fn run(args: &Recipes, output: &Output) -> Result<ExitCode> {
    match &args.action {
        None | Some(RecipesAction::List) => list(output)?,
        Some(RecipesAction::Show { recipe }) => show(recipe, output)?,
        Some(RecipesAction::Check { recipes }) => check(recipes, output)?,
        Some(RecipesAction::Import { file }) => import(file, output)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list(output: &Output) -> Result<()> {
    let mut documents = Vec::new();
    for builtin in recipe::list() {
        documents.push(document(&builtin.recipe()?, builtin.name, builtin.about()));
    }
    if output.json() {
        return print(documents, output);
    }
    let rows: Vec<Vec<String>> = documents.into_iter().map(|d| vec![d.name, d.about]).collect();
    output.text(&table(&["recipe", "for"], &[Align::Left, Align::Left], &rows))
}

fn show(name: &str, output: &Output) -> Result<()> {
    let recipe = recipe::load(Some(name))?;
    if output.json() {
        return print(vec![document(&recipe, name, recipe.description.clone())], output);
    }
    output.text(&recipe.to_toml())
}

fn check(names: &[String], output: &Output) -> Result<()> {
    let mut documents = Vec::new();
    let mut problems = Vec::new();
    let mut headlines = Vec::new();
    for name in names {
        match recipe::load(Some(name)) {
            Ok(recipe) => documents.push(document(&recipe, name, recipe.description.clone())),
            Err(failure) => {
                headlines.push(failure.headline);
                problems.extend(failure.problems);
            }
        }
    }
    if !headlines.is_empty() {
        let headline = match headlines.as_slice() {
            [one] => one.clone(),
            many => format!("{} recipes are not usable", many.len()),
        };
        return Err(Failure { kind: FailureKind::Usage, headline, problems, closing: None });
    }
    if output.json() {
        return print(documents, output);
    }
    let lines = documents
        .iter()
        .map(|d| format!("{}: ok, {} rules, sha256 {}\n", d.name, d.rules, d.sha256));
    output.text(&lines.collect::<String>())
}

fn import(file: &str, output: &Output) -> Result<()> {
    let text = recipe::import_file(file, &|name| std::env::var(name).ok())?;
    if output.json() {
        let source = SourceText { name: format!("{file} as TOML"), text };
        let recipe = Recipe::parse(source.into())?;
        return print(vec![document(&recipe, file, recipe.description.clone())], output);
    }
    output.text(&text)
}

fn document(recipe: &Recipe, name: &str, about: String) -> RecipeDocument {
    RecipeDocument {
        name: name.to_owned(),
        about,
        sha256: recipe.digest(),
        rules: recipe.rules.len(),
        toml: recipe.to_toml(),
    }
}

fn print(recipes: Vec<RecipeDocument>, output: &Output) -> Result<()> {
    output.document(&RecipesDocument { schema: "radpack.recipes", recipes })
}
