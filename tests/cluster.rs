//! The Jobs of `docs/deploy/kubernetes.yaml` without a cluster: their documents are what Kubernetes takes, and their command
//! lines, run as it would run them, give the bytes of one machine.

mod cli_support;
mod cluster_support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use cli_support::{dense_copy, sha256, succeeds};
use cluster_support::{documents, expanded};
use serde_json::{Value, json};
use tempfile::tempdir;

/// The Job of the parts and that of the merge.
fn jobs() -> [Value; 2] {
    let path = testkit::root().join("docs/deploy/kubernetes.yaml");
    let all = documents(&fs::read_to_string(path).expect("reads"));
    all.try_into().unwrap_or_else(|all: Vec<Value>| panic!("{} documents", all.len()))
}

/// The one container of a Job.
fn container(job: &Value) -> &Value {
    let containers = job["spec"]["template"]["spec"]["containers"].as_array().expect("a list");
    assert_eq!(containers.len(), 1);
    &containers[0]
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// Names and values of a container's environment.
fn environment(container: &Value) -> Vec<(String, String)> {
    let all = container["env"].as_array().expect("a list");
    all.iter().map(|e| (text(&e["name"]).to_owned(), text(&e["value"]).to_owned())).collect()
}

#[test]
fn the_manifest_has_the_keys_and_types_of_kubernetes_jobs() {
    let schema = testkit::fixtures().join("deploy/kubernetes-job.schema.json");
    let schema: Value = serde_json::from_slice(&fs::read(schema).expect("reads")).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let wrong = |job: &Value| -> Vec<String> {
        validator.iter_errors(job).map(|e| e.to_string()).collect()
    };
    let [parts, merge] = jobs();
    assert_eq!((wrong(&parts), wrong(&merge)), (Vec::new(), Vec::new()));
    // The schema finds what the API server would refuse.
    let mut bad = parts.clone();
    bad["spec"]["template"]["spec"]["containers"][0]["resource"] = json!({});
    bad["spec"]["completions"] = json!("4");
    assert_eq!(wrong(&bad).len(), 2, "{:?}", wrong(&bad));

    for job in [&parts, &merge] {
        let pod = &job["spec"]["template"]["spec"];
        // Jobs take Never and OnFailure; a limit for each index takes Never alone.
        assert_eq!(pod["restartPolicy"], "Never");
        let container = container(job);
        let volumes = pod["volumes"].as_array().expect("a list");
        let volumes: Vec<&str> = volumes.iter().map(|v| text(&v["name"])).collect();
        let mounts = container["volumeMounts"].as_array().expect("a list");
        for mount in mounts {
            assert!(volumes.contains(&text(&mount["name"])), "{mount}");
        }
        // What outlives the pod lies on the volume.
        for (name, value) in environment(container) {
            let kept = name == "OUT" || name == "HF_HOME";
            assert!(!kept || mounts.iter().any(|m| value.starts_with(text(&m["mountPath"]))));
        }
    }
    let spec = &parts["spec"];
    assert_eq!(spec["completionMode"], "Indexed");
    assert_eq!(spec["parallelism"], spec["completions"]);
    for job in [&parts, &merge] {
        let environment = environment(container(job));
        let count = spec["completions"].to_string();
        assert!(environment.contains(&("PARTS".to_owned(), count)), "{environment:?}");
    }
    // The commands in the file's head name these.
    let labels = [&parts, &merge].map(|job| text(&job["metadata"]["labels"]["step"]).to_owned());
    assert_eq!(labels, ["parts", "merge"]);
    assert_eq!(parts["metadata"]["name"], "radpack-parts");
}

/// A pod's process, with its environment and the folder in place of the volume.
fn start(job: &Value, folder: &Path, index: Option<u64>) -> Child {
    let container = container(job);
    let out = folder.join("out/model.rad").display().to_string();
    let mut environment = environment(container);
    for (name, value) in &mut environment {
        match name.as_str() {
            "SOURCE" => *value = folder.join("model").display().to_string(),
            "OUT" => value.clone_from(&out),
            _ => {}
        }
    }
    environment.extend(index.map(|i| ("JOB_COMPLETION_INDEX".to_owned(), i.to_string())));
    let words = ["command", "args"].map(|key| container[key].as_array().expect("a list").clone());
    let words: Vec<String> =
        words.iter().flatten().map(|word| expanded(text(word), &environment)).collect();
    let (program, arguments) = words.split_first().expect("a program");
    Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", format!("{}:/usr/bin:/bin", folder.join("bin").display()))
        .envs(environment)
        .current_dir("/")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts")
}

fn completes(pod: Child) {
    let ran = pod.wait_with_output().expect("ends");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn pods_of_the_manifest_make_the_bytes_of_one_machine() {
    let tmp = tempdir().expect("a folder");
    let folder = tmp.path();
    dense_copy(folder);
    for name in ["out", "bin"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    let radpack = env!("CARGO_BIN_EXE_radpack");
    std::os::unix::fs::symlink(radpack, folder.join("bin/radpack")).expect("links");
    let [parts, merge] = jobs();
    let count = parts["spec"]["completions"].as_u64().expect("a number");
    let pods: Vec<Child> = (0..count).map(|i| start(&parts, folder, Some(i))).collect();
    pods.into_iter().for_each(completes);
    completes(start(&merge, folder, None));
    let recipe = environment(container(&parts));
    let recipe = recipe.iter().find(|(name, _)| name == "RECIPE").expect("a recipe");
    succeeds(folder, &["convert", "model", "--recipe", &recipe.1, "-o", "whole.rad"]);
    assert_eq!(sha256(&folder.join("out/model.rad")), sha256(&folder.join("whole.rad")));
}

#[test]
fn references_are_expanded_as_kubernetes_does() {
    let environment = [("A".to_owned(), "x".to_owned())];
    let of = |text| expanded(text, &environment);
    assert_eq!(of("$(A)/$A/$(B)/$$(A)/$"), "x/$A/$(B)/$(A)/$");
    assert_eq!(of("$((A + 1))"), "$((A + 1))");
}
