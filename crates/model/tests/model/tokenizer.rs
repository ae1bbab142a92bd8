use proptest::prelude::*;
use strobe_model::{Tokenizer, presets};

use crate::support::{fixture, says, scratch};

#[test]
fn bytes_are_tokens_from_three_on() {
    let tokenizer = Tokenizer::byte_level(512);
    assert_eq!(tokenizer.encode("a\0é").unwrap(), [3 + 97, 3, 3 + 0xC3, 3 + 0xA9]);
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.vocab_size()), (Some(1), Some(2), 512));
    assert_eq!(tokenizer.encode("").unwrap(), Vec::<u32>::new());
    assert_eq!(tokenizer.decode(&[]).unwrap(), "");
    assert_eq!(Tokenizer::byte_level(10).vocab_size(), 259);
}

#[test]
fn every_preset_has_its_whole_vocabulary() {
    for preset in presets().iter().take(4) {
        assert_eq!(preset.tokenizer().vocab_size(), preset.config().vocab_size, "{}", preset.name);
    }
    let large = Tokenizer::byte_level(151_936);
    assert_eq!(large.vocab_size(), 151_936);
    assert_eq!(large.decode(&[259, 260, 259 + 676]).unwrap(), " aa ab aaa");
}

#[test]
fn ids_that_nobody_knows_are_shown_as_such() {
    let tokenizer = Tokenizer::byte_level(512);
    let hi = tokenizer.encode("hi").unwrap();
    let ids = [1, hi[0], 512, u32::MAX, hi[1], 2];
    assert_eq!(tokenizer.decode(&ids).unwrap(), "h\u{FFFD}\u{FFFD}i");
    // Bytes that are no UTF-8 by themselves.
    assert_eq!(tokenizer.decode(&[3 + 0xFF]).unwrap(), "\u{FFFD}");
}

#[test]
fn a_stored_tokenizer_is_the_same() {
    let tokenizer = Tokenizer::byte_level(600);
    let dir = scratch("stored-tokenizer");
    assert!(Tokenizer::from_dir(&dir).unwrap().is_none());
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_json().unwrap()).unwrap();
    let stored = Tokenizer::from_dir(&dir).unwrap().unwrap();
    assert_eq!((stored.vocab_size(), stored.bos_id(), stored.eos_id()), (600, Some(1), Some(2)));
    let text = "any </s> text \u{7}\r\n 🦀 <s>";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids.len(), text.len());
    assert_eq!(stored.encode(text).unwrap(), ids);
    assert_eq!(stored.decode(&ids).unwrap(), text);
}

#[test]
fn a_trained_tokenizer_is_read_without_its_cuts_and_padding() {
    let tokenizer = Tokenizer::from_dir(&fixture("llama")).unwrap().unwrap();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(1), Some(2)));
    assert!(tokenizer.vocab_size() <= 64);
    let text = "the mechanic sees the running engine stand still and makes the lamp run";
    let ids = tokenizer.encode(text).unwrap();
    // The file asks for truncation to 4 and padding to 8.
    assert!(ids.len() > 8, "{ids:?}");
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    let framed = tokenizer.encode_with_special_tokens(text).unwrap();
    assert_eq!((framed[0], &framed[1..]), (1, &ids[..]));
    assert_eq!(tokenizer.decode(&framed).unwrap(), text);
    assert_eq!(tokenizer.encode("the </s>").unwrap().last(), Some(&2));
}

#[test]
fn a_damaged_tokenizer_is_an_error() {
    let path = scratch("bad-tokenizer").join("tokenizer.json");
    for text in ["", "{}", "not json", "{\"model\": {\"type\": \"BPE\"}}"] {
        std::fs::write(&path, text).unwrap();
        says(Tokenizer::from_file(&path), &["tokenizer.json"]);
    }
    says(Tokenizer::from_file(&path.with_file_name("gone.json")), &["cannot read", "gone.json"]);
}

proptest! {
    #[test]
    fn any_text_round_trips(text in any::<String>()) {
        let tokenizer = Tokenizer::byte_level(512);
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(ids.len(), text.len());
        prop_assert!(ids.iter().all(|id| (3..259).contains(id)));
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }

    #[test]
    fn any_ids_have_a_text(ids in prop::collection::vec(any::<u32>(), 0..40), small in prop::collection::vec(0u32..600, 0..40)) {
        let tokenizer = Tokenizer::byte_level(512);
        prop_assert!(tokenizer.decode(&ids).is_ok());
        prop_assert!(tokenizer.decode(&small).is_ok());
    }
}
