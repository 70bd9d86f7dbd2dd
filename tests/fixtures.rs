//! The committed and generated test models are the ones their manifest describes.

use std::collections::BTreeMap;
use std::fs;

use safetensors::SafeTensors;

#[test]
fn every_generated_file_has_the_digest_of_the_manifest() {
    let manifest = testkit::spec::manifest().unwrap();
    let known: Vec<&str> = manifest.keys().map(String::as_str).collect();
    assert_eq!(known, testkit::names());
    let scratch = tempfile::tempdir().unwrap();
    for (name, digests) in &manifest {
        let out = scratch.path().join(name);
        testkit::generate(name, &out).unwrap();
        assert_eq!(testkit::tiny::verify(&out, digests), Ok(()), "{name}");
    }
}

#[test]
fn the_committed_model_is_the_generated_one() {
    let committed = testkit::fixtures().join("tiny-gemma4-dense");
    let digests = &testkit::spec::manifest().unwrap()["tiny-gemma4-dense"];
    assert_eq!(testkit::tiny::verify(&committed, digests), Ok(()));
}

#[test]
fn names_shapes_and_index_agree_with_what_the_safetensors_library_reads() {
    for (name, digests) in testkit::spec::manifest().unwrap() {
        let folder = testkit::tiny_model(&name);
        let (mut tensors, mut bytes, mut data) = (BTreeMap::new(), 0, 0);
        for file in digests.sha256.keys().filter(|f| f.ends_with(".safetensors")) {
            let shard = fs::read(folder.join(file)).unwrap();
            bytes += shard.len() as u64;
            let parsed = SafeTensors::deserialize(&shard).unwrap();
            for (tensor, view) in parsed.tensors() {
                data += view.data().len() as u64;
                assert_eq!(
                    tensors.insert(tensor, file.clone()),
                    None,
                    "{name}: tensor in two shards"
                );
            }
        }
        assert_eq!(
            (tensors.len(), data, bytes),
            (digests.tensors, 2 * digests.params, digests.bytes)
        );
        if let Ok(index) = fs::read(folder.join("model.safetensors.index.json")) {
            let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
            let map: BTreeMap<String, String> =
                serde_json::from_value(index["weight_map"].clone()).unwrap();
            assert_eq!(map, tensors, "{name}");
            assert_eq!(index["metadata"]["total_size"], data, "{name}");
        }
    }
}

#[test]
fn a_damaged_cached_model_is_made_anew() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = testkit::tiny::cached("tiny-mistral", scratch.path()).unwrap();
    fs::write(folder.join("model.safetensors"), b"not a shard").unwrap();
    fs::write(folder.join("stray.json"), b"{}").unwrap();
    assert_eq!(testkit::tiny::cached("tiny-mistral", scratch.path()), Ok(folder.clone()));
    let digests = &testkit::spec::manifest().unwrap()["tiny-mistral"];
    assert_eq!(testkit::tiny::verify(&folder, digests), Ok(()));
}

#[test]
fn threads_that_ask_for_one_model_at_once_get_one_complete_folder() {
    let scratch = tempfile::tempdir().unwrap();
    let digests = &testkit::spec::manifest().unwrap()["tiny-llama"];
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                let folder = testkit::tiny::cached("tiny-llama", scratch.path()).unwrap();
                assert_eq!(testkit::tiny::verify(&folder, digests), Ok(()));
            });
        }
    });
}
