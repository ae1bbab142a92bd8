use std::fs;

use strobe_model::{Checkpoint, SafeTensors};

use crate::support::{CASES, copy_of, fixture, says, scratch};

#[test]
fn one_file_or_many_are_one_set_of_tensors() {
    for case in CASES {
        let checkpoint = Checkpoint::open(&fixture(case)).unwrap();
        let files: u64 = fs::read_dir(fixture(case))
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            .map(|p| fs::metadata(p).unwrap().len())
            .sum();
        assert_eq!(checkpoint.total_bytes(), files);
        let embedding = checkpoint.tensor("model.embed_tokens.weight").unwrap();
        assert_eq!(embedding.shape, [64, 32]);
        assert!(checkpoint.tensor("no.such.tensor").is_none());
    }
}

#[test]
fn a_file_of_another_name_will_do() {
    let dir = copy_of("llama", "other-name");
    fs::rename(dir.join("model.safetensors"), dir.join("weights.safetensors")).unwrap();
    assert!(Checkpoint::open(&dir).unwrap().tensor("lm_head.weight").is_some());
    fs::copy(dir.join("weights.safetensors"), dir.join("more.safetensors")).unwrap();
    says(Checkpoint::open(&dir), &["other-name", "2 *.safetensors", "model.safetensors.index.json"]);
}

#[test]
fn a_directory_without_weights_says_what_is_expected() {
    let dir = scratch("no-weights");
    says(Checkpoint::open(&dir), &["no-weights", "no *.safetensors"]);
    says(Checkpoint::open(&dir.join("nowhere")), &["nowhere", "not a directory"]);
    fs::create_dir(dir.join("model.safetensors")).unwrap();
    says(Checkpoint::open(&dir), &["model.safetensors", "not a regular file"]);
}

#[test]
fn missing_shards_and_tensors_are_named() {
    let shard = "model-00002-of-00003.safetensors";
    let dir = copy_of("llama-sharded", "missing-shard");
    fs::remove_file(dir.join(shard)).unwrap();
    says(Checkpoint::open(&dir), &["missing-shard", shard, "missing", "download"]);

    let dir = copy_of("llama-sharded", "missing-tensor");
    fs::copy(dir.join("model-00001-of-00003.safetensors"), dir.join(shard)).unwrap();
    let index = fs::read_to_string(dir.join("model.safetensors.index.json")).unwrap();
    let in_second = SafeTensors::open(&fixture("llama-sharded").join(shard)).unwrap();
    let lost = in_second.names().min().unwrap().to_string();
    assert!(index.contains(&lost));
    says(Checkpoint::open(&dir), &[shard, &format!("`{lost}`"), "it is not"]);
}

#[test]
fn a_bad_index_is_refused() {
    let open_with = |name: &str, text: &str| {
        let dir = copy_of("llama-sharded", name);
        fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
        Checkpoint::open(&dir)
    };
    says(open_with("index-text", "hello"), &["index.json", "line 1", "weight_map"]);
    says(open_with("index-empty", "{\"metadata\": {}}"), &["index.json", "weight_map"]);
    for outside in ["../secret.safetensors", "/etc/passwd", "", ".."] {
        let text = serde_json::json!({"weight_map": {"a": outside}}).to_string();
        says(open_with("index-outside", &text), &["index.json", "not in this directory"]);
    }
}
