//! Text to token ids and back.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{ModelError, excerpt};

/// Names of the begin and end tokens, for files that do not say which theirs are.
const USUAL_BOS: [&str; 3] = ["<s>", "<|begin_of_text|>", "<|startoftext|>"];
const USUAL_EOS: [&str; 5] = ["</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>"];

/// The tokenizer of a model, or the byte tokenizer that presets come with.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    origin: String,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer of a model directory; `None` when there is no `tokenizer.json`.
    pub fn from_dir(dir: &Path) -> Result<Option<Tokenizer>, ModelError> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        Tokenizer::from_file(&path).map(Some)
    }

    /// Reads a `tokenizer.json`. Begin and end token come from `tokenizer_config.json` beside it, else by their usual
    /// names.
    pub fn from_file(path: &Path) -> Result<Tokenizer, ModelError> {
        let bytes = std::fs::read(path).map_err(ModelError::io("read", path))?;
        let mut tokenizer = Tokenizer::from_json(&bytes, &path.display().to_string(), None, None)?;
        let named = path.parent().map(|dir| named_tokens(&dir.join("tokenizer_config.json"))).unwrap_or_default();
        let id = |name: Option<String>| name.and_then(|name| tokenizer.inner.token_to_id(&name));
        let (bos, eos) = (id(named.bos), id(named.eos));
        tokenizer.bos = bos.or(tokenizer.bos);
        tokenizer.eos = eos.or(tokenizer.eos);
        Ok(tokenizer)
    }

    /// The content of a `tokenizer.json`; begin and end token are found by their usual names where they are not given.
    pub(crate) fn from_json(
        bytes: &[u8],
        origin: &str,
        bos: Option<u32>,
        eos: Option<u32>,
    ) -> Result<Tokenizer, ModelError> {
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| ModelError::Tokenizer {
            origin: origin.to_string(),
            problem: format!("not a tokenizer this version can read: {}", excerpt(&e.to_string())),
        })?;
        let mut tokenizer = Tokenizer::wrap(inner, origin.to_string());
        tokenizer.bos = bos.or(tokenizer.bos);
        tokenizer.eos = eos.or(tokenizer.eos);
        Ok(tokenizer)
    }

    /// A tokenizer without training: one token per byte of UTF-8, so any text round-trips.
    ///
    /// Ids 0 to 2 are `<unk>`, `<s>` and `</s>`, ids 3 to 258 the bytes (Llama's convention). The rest of the vocabulary
    /// are short made-up words that no text encodes to, so that the output of random weights can be shown. A
    /// vocabulary of fewer than 259 is rounded up to that.
    pub fn byte_level(vocab_size: usize) -> Tokenizer {
        use tokenizers::decoders::DecoderWrapper;
        use tokenizers::models::bpe::BPE;
        use tokenizers::pre_tokenizers::byte_level::ByteLevel;

        let names = SPECIAL.iter().map(|name| name.to_string());
        let bytes = (0..=255u8).map(|byte| byte_symbol(byte).to_string());
        let words = (0..vocab_size.saturating_sub(SPECIAL.len() + 256)).map(filler_word);
        let vocab = names.chain(bytes).chain(words).zip(0u32..).collect();
        // No merges: every byte stays a token. And no added tokens: the text "</s>" is four bytes, not the end.
        let mut inner = tokenizers::Tokenizer::new(BPE::new(vocab, Vec::new()));
        let byte_level = ByteLevel::new(false, false, false);
        inner.with_pre_tokenizer(Some(byte_level));
        inner.with_decoder(Some(DecoderWrapper::ByteLevel(byte_level)));
        Tokenizer::wrap(inner, "byte tokenizer".to_string())
    }

    /// The tokens of a text, without any that frame it. Special tokens spelled out in the text are recognised, as in
    /// `transformers`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        self.encode_as(text, false)
    }

    /// The tokens of a text, framed as the tokenizer's file wants it (usually: begin token first).
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        self.encode_as(text, true)
    }

    /// The text of tokens. Special tokens are left out; an id that the tokenizer does not know (models have larger
    /// tables than tokenizers, and random weights choose any of their rows) is shown as the replacement character.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        let mut text = String::new();
        let shown: Vec<u32> = ids.iter().copied().filter(|id| Some(*id) != self.bos && Some(*id) != self.eos).collect();
        for run in shown.chunk_by(|a, b| self.knows(*a) == self.knows(*b)) {
            if run.first().is_some_and(|id| self.knows(*id)) {
                text.push_str(&self.inner.decode(run, true).map_err(|e| self.error(e))?);
            } else {
                text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, run.len()));
            }
        }
        Ok(text)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token that ends a text.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// The token that begins a text.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// The tokenizer as the text of a `tokenizer.json`.
    pub fn to_json(&self) -> Result<String, ModelError> {
        self.inner.to_string(false).map_err(|e| self.error(e))
    }

    /// Which tokens begin and end a text, as the text of a `tokenizer_config.json`.
    pub fn config_json(&self) -> String {
        let name = |id: Option<u32>| id.and_then(|id| self.inner.id_to_token(id));
        json!({"bos_token": name(self.bos), "eos_token": name(self.eos)}).to_string()
    }

    fn wrap(mut inner: tokenizers::Tokenizer, origin: String) -> Tokenizer {
        // Files carry the settings of whoever saved them; prompts must be neither cut nor padded.
        inner.with_padding(None);
        // Removing the limit has no failure of its own: only setting one is checked.
        let _ = inner.with_truncation(None);
        let vocab = inner.get_vocab(true);
        let usual = |names: &[&str]| names.iter().find_map(|name| vocab.get(*name).copied());
        let vocab_size = vocab.values().max().map_or(0, |largest| *largest as usize + 1);
        let (bos, eos) = (usual(&USUAL_BOS), usual(&USUAL_EOS));
        Tokenizer { inner, origin, vocab_size, bos, eos }
    }

    fn encode_as(&self, text: &str, special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| self.error(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn knows(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }

    fn error(&self, error: tokenizers::Error) -> ModelError {
        ModelError::Tokenizer { origin: self.origin.clone(), problem: excerpt(&error.to_string()) }
    }
}

/// The special tokens of the byte tokenizer, from id 0.
const SPECIAL: [&str; 3] = ["<unk>", "<s>", "</s>"];

/// The printable character that stands for a byte in byte-level vocabularies (GPT-2's table).
fn byte_symbol(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let unprintable_before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(256 + unprintable_before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// A space and two or more letters, different for every number: aa, ab, ... zz, aaa, ...
fn filler_word(number: usize) -> String {
    let mut rest = number;
    let mut length = 2;
    while rest >= 26usize.pow(length) {
        rest -= 26usize.pow(length);
        length += 1;
    }
    let letters = (0..length).rev().map(|place| char::from(b'a' + (rest / 26usize.pow(place) % 26) as u8));
    std::iter::once(byte_symbol(b' ')).chain(letters).collect()
}

#[derive(Default)]
struct NamedTokens {
    bos: Option<String>,
    eos: Option<String>,
}

/// Begin and end token as `tokenizer_config.json` names them. The file is optional and so is every part of it.
fn named_tokens(path: &Path) -> NamedTokens {
    let Ok(bytes) = std::fs::read(path) else { return NamedTokens::default() };
    let config: Value = serde_json::from_slice(&bytes).unwrap_or(json!({}));
    let name = |field: &str| {
        let token = config.get(field)?;
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_string)
    };
    NamedTokens { bos: name("bos_token"), eos: name("eos_token") }
}
