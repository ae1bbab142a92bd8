//! Dataset files as users have them: every variant read, every fault named by line and field.

mod common;

use std::path::Path;

use common::TempFile;
use proptest::prelude::*;
use strobe_workload::{
    DatasetError, Prompt, RealOutput, Sample, check_ids, read_dataset, read_real_dataset, write_dataset,
};

fn read(content: &[u8]) -> Result<Vec<Sample>, DatasetError> {
    read_dataset(&TempFile::new(content).0)
}

fn ids(task_id: i64, ids: &[u32], output_tokens: u32) -> Sample {
    Sample { task_id, prompt: Prompt::Ids(ids.to_vec()), output_tokens }
}

#[test]
fn the_anchors_line_is_written_byte_for_byte() {
    let samples = [
        ids(0, &[863, 22056, 31], 128),
        Sample { task_id: -2, prompt: Prompt::Text("say \"hi\"\n\u{e9}".to_string()), output_tokens: 1 },
    ];
    let mut out = Vec::new();
    write_dataset(&mut out, &samples).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert_eq!(
        text,
        "{\"task_id\":0,\"input_ids\":[863,22056,31],\"output_tokens\":128}\n\
         {\"task_id\":-2,\"prompt\":\"say \\\"hi\\\"\\n\u{e9}\",\"output_tokens\":1}\n"
    );
}

#[test]
fn the_anchors_variants_are_read() {
    let lines = r#"
{"task_id":0,"input_ids":[863,22056,31],"output_tokens":128}
{"task_id":1,"input_ids":[5,6],"output_tokens":128,"lora_request":{"lora_name":"lora_3","lora_int_id":3,"lora_path":"loras/3"}}

{"task_id":2,"prompt":"text","media_paths":["a.jpg"],"output_tokens":128}
{"task_id":3,"turns":["..."],"output_tokens":128,"input_ids":[1,2],"category":"x","question_id":7}
{"task_id":4,"logits":[9],"output_tokens":1}
{"task_id":5,"input_ids":[1],"logits":[2],"prompt":"text","output_tokens":1}
{"task_id":6,"input_ids":null,"prompt":"text","output_tokens":1}
"#;
    let text = |task_id, output_tokens| Sample { task_id, prompt: Prompt::Text("text".to_string()), output_tokens };
    let expected = [
        ids(0, &[863, 22056, 31], 128),
        ids(1, &[5, 6], 128),
        text(2, 128),
        ids(3, &[1, 2], 128),
        ids(4, &[9], 1),
        ids(5, &[1], 1),
        text(6, 1),
    ];
    assert_eq!(read(lines.as_bytes()).unwrap(), expected);
    let windows = format!("\u{feff}{}", lines.replace('\n', "\r\n"));
    assert_eq!(read(windows.as_bytes()).unwrap(), expected);
}

#[test]
fn the_older_single_document_is_read_compact_and_pretty() {
    let compact = r#"{"metadata":{"workload_type":"token-norm-dist"},"samples":[{"input_len":2,"input_ids":[7,8],"output_len":3,"task_id":-1},{"input_len":1,"input_ids":[9],"output_len":4,"task_id":-1}]}"#;
    let pretty = compact.replace(',', ",\n  ").replace('{', "{\n");
    for content in [compact, &pretty] {
        let samples = read(content.as_bytes()).unwrap();
        assert_eq!(samples, [ids(0, &[7, 8], 3), ids(1, &[9], 4)]);
    }
}

/// Reads content that must fail and checks that the error is one line holding all the words.
fn fails(content: &[u8], words: &[&str]) {
    let error = read(content).expect_err(&String::from_utf8_lossy(content));
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn malformed_lines_name_line_and_field() {
    let good = r#"{"task_id":0,"input_ids":[1],"output_tokens":2}"#;
    let cases: &[(&str, &[&str])] = &[
        (r#"{"task_id":0,"input_ids":[1"#, &["not valid JSON", "EOF", "column 27"]),
        (r#"{"task_id":0} {"#, &["not valid JSON", "trailing"]),
        ("plain text", &["not valid JSON"]),
        (r#"{"input_ids":[1],"output_tokens":2}"#, &["\"task_id\"", "no such field"]),
        (r#"{"task_id":"0","input_ids":[1],"output_tokens":2}"#, &["\"task_id\"", "the text \"0\""]),
        (r#"{"task_id":1.5,"input_ids":[1],"output_tokens":2}"#, &["\"task_id\"", "1.5"]),
        (r#"{"task_id":0,"input_ids":[1]}"#, &["\"output_tokens\"", "no such field"]),
        (r#"{"task_id":0,"input_ids":[1],"output_tokens":0}"#, &["\"output_tokens\"", "from 1", "found 0"]),
        (r#"{"task_id":0,"input_ids":[1],"output_tokens":-3}"#, &["\"output_tokens\"", "found -3"]),
        (r#"{"task_id":0,"input_ids":[1],"output_tokens":2.0}"#, &["\"output_tokens\"", "2.0"]),
        (r#"{"task_id":0,"input_ids":[1],"output_tokens":4294967296}"#, &["\"output_tokens\"", "4294967296"]),
        (r#"{"task_id":0,"input_ids":[1],"output_tokens":null}"#, &["\"output_tokens\"", "null"]),
        (r#"{"task_id":0,"output_tokens":2}"#, &["\"input_ids\"", "prompt", "neither"]),
        (r#"{"task_id":0,"input_ids":[],"output_tokens":2}"#, &["\"input_ids\"", "an empty list"]),
        (r#"{"task_id":0,"input_ids":7,"output_tokens":2}"#, &["\"input_ids\"", "found 7"]),
        (r#"{"task_id":0,"input_ids":[4,-1],"output_tokens":2}"#, &["input_ids[1]", "found -1"]),
        (r#"{"task_id":0,"input_ids":[4,5,1.5],"output_tokens":2}"#, &["input_ids[2]", "found 1.5"]),
        (r#"{"task_id":0,"input_ids":[4294967296],"output_tokens":2}"#, &["input_ids[0]", "4294967296"]),
        (r#"{"task_id":0,"input_ids":[99999999999999999999],"output_tokens":2}"#, &["input_ids[0]", "found 1e"]),
        (r#"{"task_id":0,"logits":["x"],"output_tokens":2}"#, &["logits[0]", "the text \"x\""]),
        (r#"{"task_id":0,"prompt":"","output_tokens":2}"#, &["\"prompt\"", "an empty text"]),
        (r#"{"task_id":0,"prompt":{"a":1},"output_tokens":2}"#, &["\"prompt\"", "an object"]),
        ("[1,2]", &["expected a JSON object", "a list of 2"]),
        ("null", &["expected a JSON object", "null"]),
    ];
    for (bad, words) in cases {
        let mut words = words.to_vec();
        words.push("line 4");
        // A good line and a blank one before it, so that the line number means something.
        fails(format!("{good}\n\n{good}\n{bad}\n{good}\n").as_bytes(), &words);
        words.pop();
        words.push("line 1");
        fails(bad.as_bytes(), &words);
    }
}

#[test]
fn files_that_are_no_datasets() {
    for empty in ["", "\n\n  \r\n", "\u{feff}"] {
        fails(empty.as_bytes(), &["no samples"]);
    }
    let good = r#"{"task_id":0,"input_ids":[1],"output_tokens":2}"#;
    let mut bytes = good.as_bytes().to_vec();
    bytes.extend_from_slice(b"\n{\"task_id\":\xff}\n");
    fails(&bytes, &["line 2", "not UTF-8", "offset 11"]);

    let directory = read_dataset(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap_err();
    assert!(directory.to_string().contains("is a directory"), "{directory}");
    let missing = read_dataset(Path::new("no/such/file.jsonl")).unwrap_err();
    assert!(missing.to_string().contains("no/such/file.jsonl"), "{missing}");
}

#[test]
fn malformed_documents_name_the_sample() {
    let sample = |body: &str| format!(r#"{{"samples":[{{"input_ids":[1],"output_len":2}},{body}]}}"#);
    fails(sample("7").as_bytes(), &["samples[1]", "expected a JSON object", "found 7"]);
    fails(sample(r#"{"output_len":2}"#).as_bytes(), &["samples[1]", "\"input_ids\""]);
    fails(sample(r#"{"input_ids":[1]}"#).as_bytes(), &["samples[1]", "\"output_len\""]);
    let short = r#"{"input_ids":[1],"output_len":2,"input_len":5}"#;
    fails(sample(short).as_bytes(), &["samples[1]", "\"input_len\"", "found 5"]);
    fails(br#"{"samples":[]}"#, &["no samples"]);
    fails(br#"{"samples":3}"#, &["\"samples\"", "a list of objects", "found 3"]);
    let truncated = "{\n  \"metadata\": {},\n  \"samples\": [\n    {\"input_ids\": [1";
    fails(truncated.as_bytes(), &["line 4", "one document"]);
}

#[test]
fn ids_outside_the_vocabulary_are_found() {
    let line = |sample: &Sample| {
        let mut bytes = Vec::new();
        write_dataset(&mut bytes, std::slice::from_ref(sample)).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    let samples = [ids(0, &[0, 31], 1), ids(7, &[1, 2, 32], 1)];
    let file = TempFile::new(format!("{}\n\n{}", line(&samples[0]), line(&samples[1])).as_bytes());
    assert!(check_ids(&file.0, &samples, 33).is_ok());
    let error = check_ids(&file.0, &samples, 32).unwrap_err().to_string();
    for word in ["vocab id out of range", "line 4", "task_id 7", "input_ids[2] is 32", "0 to 31"] {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
    assert!(check_ids(&file.0, &samples, 0).is_err());
}

#[test]
fn real_datasets_take_answers_or_lengths() {
    let file = TempFile::new(b"{\"q\":\"one\",\"a\":\"two words\"}\n\n{\"q\":\"three\",\"a\":12}\n");
    let samples = read_real_dataset(&file.0, "q", Some("a")).unwrap();
    assert_eq!(samples[0].output, Some(RealOutput::Text("two words".to_string())));
    assert_eq!((samples[1].line, &samples[1].output), (3, &Some(RealOutput::Tokens(12))));
    let prompts = read_real_dataset(&file.0, "q", None).unwrap();
    assert!(prompts.iter().all(|s| s.output.is_none()));

    let cases: [(&[u8], &[&str]); 7] = [
        (b"{\"text\":\"x\"}", &["line 1", "\"q\"", "the line has: text"]),
        (b"{\"q\":1,\"a\":1}", &["line 1", "\"q\"", "found 1"]),
        (b"{\"q\":\"x\",\"a\":1}\n{\"q\":\"x\"}", &["line 2", "\"a\""]),
        (b"{\"q\":\"x\",\"a\":0}", &["line 1", "\"a\"", "found 0"]),
        (b"{\"q\":\"x\",\"a\":1.5}", &["line 1", "\"a\"", "found 1.5"]),
        (b"{\"q\":\"x\",\"a\":[]}", &["line 1", "\"a\"", "an empty list"]),
        (b"", &["no samples"]),
    ];
    for (content, words) in cases {
        let file = TempFile::new(content);
        let error = read_real_dataset(&file.0, "q", Some("a")).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
    }
}

fn any_sample() -> impl Strategy<Value = Sample> {
    let prompt = prop_oneof![
        prop::collection::vec(any::<u32>(), 1..20).prop_map(Prompt::Ids),
        any::<String>().prop_filter("a prompt is not empty", |text| !text.is_empty()).prop_map(Prompt::Text),
    ];
    (any::<i64>(), prompt, 1..=u32::MAX).prop_map(|(task_id, prompt, output_tokens)| Sample {
        task_id,
        prompt,
        output_tokens,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read_back(samples in prop::collection::vec(any_sample(), 1..8)) {
        let mut out = Vec::new();
        write_dataset(&mut out, &samples).unwrap();
        prop_assert_eq!(read(&out).unwrap(), samples);
    }

    #[test]
    fn no_bytes_make_the_reader_panic(content in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&content);
    }

    #[test]
    fn no_cut_or_flip_makes_the_reader_panic(cut in 0usize..90, flip in 0usize..90, byte: u8) {
        let mut content = br#"{"task_id":0,"input_ids":[1,2],"output_tokens":2}
{"task_id":1,"prompt":"x","output_tokens":9}"#.to_vec();
        let last = content.len() - 1;
        content[flip.min(last)] = byte;
        content.truncate(cut);
        let _ = read(&content);
    }
}
