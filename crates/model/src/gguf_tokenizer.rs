//! The tokenizer of a GGUF file, rebuilt as the `tokenizer.json` it was once made from.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::error::{ModelError, excerpt};
use crate::gguf::Gguf;
use crate::gguf_model::GgufModel;
use crate::tokenizer::Tokenizer;

/// What the file says of a token, as far as it matters here.
mod token_type {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
}

/// How Llama 3 and Qwen 2 cut text into words, up to how many digits they keep together.
const WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The mark that SentencePiece puts for a space.
const SPACE: &str = "\u{2581}";

impl GgufModel {
    /// The file's tokenizer, or why strobe can't rebuild it. A damaged one is an error.
    pub fn tokenizer(&self) -> Result<Result<Tokenizer, String>, ModelError> {
        let file = self.file();
        let Some(kind) = file.text("tokenizer.ggml.model")? else {
            return Ok(Err("the file has none".to_string()));
        };
        let read = || -> Result<Result<Value, String>, ModelError> {
            Ok(match kind {
                "gpt2" => {
                    let vocabulary = Vocabulary::read(file, self.config().vocab_size)?;
                    byte_level(file, &vocabulary)?
                }
                "llama" => {
                    let vocabulary = Vocabulary::read(file, self.config().vocab_size)?;
                    sentence_piece(file, &vocabulary).map(Ok)?
                }
                other => Err(format!("tokenizer.ggml.model is `{}`; supported: gpt2, llama", excerpt(other))),
            })
        };
        let text = match read()? {
            Ok(document) => document.to_string(),
            Err(reason) => return Ok(Err(reason)),
        };
        let config = self.config();
        let end = file.whole("tokenizer.ggml.eos_token_id")?.and_then(|id| u32::try_from(id).ok());
        Tokenizer::from_json(text.as_bytes(), &file.path().display().to_string(), config.bos_token_id, end).map(Ok)
    }
}

struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    types: Vec<i32>,
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a Gguf, rows: usize) -> Result<Vocabulary<'a>, ModelError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const TYPES: &str = "tokenizer.ggml.token_type";
        let wrong = |field: &str, problem: String| ModelError::config(file.path(), field, problem);
        let tokens = file.texts(TOKENS)?.ok_or_else(|| wrong(TOKENS, "is missing; expected a list of texts".into()))?;
        if tokens.len() > rows {
            let problem = format!("has {} tokens, but the embedding table {rows} rows", tokens.len());
            return Err(wrong(TOKENS, problem));
        }
        let types = file.i32s(TYPES)?.unwrap_or_else(|| vec![token_type::NORMAL; tokens.len()]);
        if types.len() != tokens.len() {
            return Err(wrong(TYPES, format!("has {} entries for {} tokens", types.len(), tokens.len())));
        }
        Ok(Vocabulary { tokens, types })
    }

    fn ids(&self) -> HashMap<&'a str, usize> {
        // Of a token that is there twice the first id counts, as it does in llama.cpp's merges.
        self.tokens.iter().enumerate().rev().map(|(id, token)| (*token, id)).collect()
    }

    /// The tokens that are looked for in a text before anything else.
    fn added(&self) -> Value {
        let added = self.tokens.iter().zip(&self.types).enumerate().filter_map(|(id, (token, kind))| {
            let special = matches!(*kind, token_type::CONTROL | token_type::UNKNOWN);
            (special || *kind == token_type::USER_DEFINED).then(|| {
                json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": special})
            })
        });
        added.collect()
    }

    /// The token that begins every text, if the file wants one.
    fn begin(&self, file: &Gguf, by_default: bool) -> Result<Value, ModelError> {
        let wanted = file.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(by_default);
        let id = file.whole("tokenizer.ggml.bos_token_id")?.filter(|_| wanted);
        let Some((id, token)) = id.and_then(|id| Some((id, self.tokens.get(id)?))) else { return Ok(Value::Null) };
        let special = json!({"SpecialToken": {"id": token, "type_id": 0}});
        Ok(json!({
            "type": "TemplateProcessing",
            "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {*token: {"id": token, "ids": [id], "tokens": [token]}},
        }))
    }

    fn document(&self, parts: Value) -> Value {
        let mut document = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added()});
        if let (Some(document), Value::Object(parts)) = (document.as_object_mut(), parts) {
            document.extend(parts);
        }
        document
    }
}

/// Byte-level BPE (GPT-2, Llama 3, Qwen). The inner error says which way of cutting words is not known.
fn byte_level(file: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Result<Value, String>, ModelError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let byte_level =
        |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let split = |digits: &str| {
        let pattern = json!({"Regex": WORDS.replace("DIGITS", digits)});
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false}, byte_level(false)]})
    };
    let words = file.text("tokenizer.ggml.pre")?.unwrap_or("(none given)");
    let (pre_tokenizer, normalizer, whole_words) = match words {
        "llama-bpe" => (split(r"\p{N}{1,3}"), Value::Null, true),
        "qwen2" => (split(r"\p{N}"), json!({"type": "NFC"}), false),
        "gpt-2" => (byte_level(true), Value::Null, false),
        "smollm" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            let parts = json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]});
            (parts, Value::Null, false)
        }
        other => {
            let reason = "tokenizer.ggml.pre is";
            return Ok(Err(format!("{reason} `{}`; supported: llama-bpe, qwen2, gpt-2, smollm", excerpt(other))));
        }
    };
    let merges = file.texts(MERGES)?;
    let merges =
        merges.ok_or_else(|| ModelError::config(file.path(), MERGES, "is missing; expected a list of texts"))?;
    // A merge is two tokens with a space between; the first may be a space itself.
    let pair = |merge: &str| {
        let space = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at)?;
        Some(json!([merge.get(..space)?, merge.get(space + 1..)?]))
    };
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in &merges {
        let problem = || format!("expected two tokens with a space between, found `{}`", excerpt(merge));
        pairs.push(pair(merge).ok_or_else(|| ModelError::config(file.path(), MERGES, problem()))?);
    }
    Ok(Ok(vocabulary.document(json!({
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": vocabulary.begin(file, words == "llama-bpe")?,
        "decoder": byte_level(true),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_words,
            "vocab": vocabulary.ids(), "merges": pairs},
    }))))
}

/// SentencePiece BPE (Llama 2, TinyLlama, Mistral): pieces with scores, from which the merges follow.
fn sentence_piece(file: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Value, ModelError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let wrong = |problem: String| ModelError::config(file.path(), SCORES, problem);
    let scores = file.f32s(SCORES)?.ok_or_else(|| wrong("is missing; expected a list of numbers".to_string()))?;
    if scores.len() != vocabulary.tokens.len() {
        return Err(wrong(format!("has {} entries for {} tokens", scores.len(), vocabulary.tokens.len())));
    }
    let ids = vocabulary.ids();
    let unknown = file.whole("tokenizer.ggml.unknown_token_id")?.and_then(|id| vocabulary.tokens.get(id));
    let prefix = file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(vocabulary.document(json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": vocabulary.begin(file, true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": ids.contains_key("<0x00>"),
            "ignore_merges": false, "vocab": ids, "merges": merges_of(vocabulary, &scores, &ids)},
    })))
}

/// Every way to join two pieces to a third, the best score first. SentencePiece joins the neighbours with the best score,
/// so the order of scores is the order of merges.
fn merges_of<'a>(
    vocabulary: &Vocabulary<'a>,
    scores: &[f32],
    ids: &HashMap<&'a str, usize>,
) -> Vec<(&'a str, &'a str)> {
    let mut merges = Vec::new();
    for ((piece, kind), score) in vocabulary.tokens.iter().zip(&vocabulary.types).zip(scores) {
        if *kind != token_type::NORMAL {
            continue;
        }
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                merges.push((*score, *left_id, *right_id, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    merges.into_iter().map(|(_, _, _, left, right)| (left, right)).collect()
}
