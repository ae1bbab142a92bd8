use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use strobe_model::{DType, SafeTensors, SafeTensorsWriter, TensorSpec};

use crate::support::{Random, fixture, says, scratch};

fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_string(), dtype: dtype.into(), shape: shape.to_vec() }
}

/// Sizes of every alignment class, in an order that is not the one in the file.
fn mixed_specs() -> Vec<TensorSpec> {
    vec![
        spec("odd", DType::Bf16, &[3]),
        spec("matrix", DType::F32, &[8, 16]),
        spec("empty", DType::F32, &[0, 5]),
        spec("scalar", DType::F32, &[]),
        spec("half", DType::F16, &[33, 32]),
        spec("twelve", DType::F32, &[3]),
        spec("thirty-two", DType::F32, &[8]),
        spec("last \"quoted\" \u{1F980}", DType::Bf16, &[64, 2]),
    ]
}

fn bytes_of(spec: &TensorSpec) -> Vec<u8> {
    let salt = spec.name.len() as u8;
    (0..spec.bytes().unwrap()).map(|i| (i as u8).wrapping_mul(31).wrapping_add(salt)).collect()
}

fn write_mixed(path: &Path, piece: usize) {
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let specs = mixed_specs();
    let all: Vec<u8> = specs.iter().flat_map(bytes_of).collect();
    let mut writer = SafeTensorsWriter::create(path, &specs, &metadata).unwrap();
    for piece in all.chunks(piece) {
        writer.write(piece).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn what_is_written_is_read_again_whatever_the_pieces() {
    let dir = scratch("round-trip");
    let mut first: Option<Vec<u8>> = None;
    for piece in [1, 7, 64, 1000, 1 << 20] {
        let path = dir.join("x.safetensors");
        write_mixed(&path, piece);
        let file = SafeTensors::open(&path).unwrap();
        for spec in mixed_specs() {
            let view = file.get(&spec.name).unwrap();
            assert_eq!((view.dtype, view.shape), (spec.dtype.safetensors_name(), &spec.shape[..]));
            assert_eq!(view.data, bytes_of(&spec), "{}", spec.name);
            // The map begins on a page, so addresses show the alignment in the file.
            let size = spec.bytes().unwrap();
            let wanted = 1usize << size.trailing_zeros().min(6);
            assert!((view.data.as_ptr() as usize).is_multiple_of(wanted), "{} is not aligned to {wanted}", spec.name);
        }
        assert_eq!(file.names().count(), mixed_specs().len());
        assert_eq!(file.metadata()["format"], "pt");
        assert_eq!((file.path(), file.file_bytes()), (&*path, fs::metadata(&path).unwrap().len()));
        file.advise_sequential();
        file.advise_will_need();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(*first.get_or_insert(bytes.clone()), bytes);
    }
}

#[test]
fn large_tensors_pass_the_buffer_whole() {
    let path = scratch("large").join("x.safetensors");
    let specs = [spec("tail", DType::F32, &[5]), spec("a", DType::F32, &[700_000]), spec("b", DType::F16, &[640])];
    let mut writer = SafeTensorsWriter::create(&path, &specs, &BTreeMap::new()).unwrap();
    specs.iter().for_each(|spec| writer.write(&bytes_of(spec)).unwrap());
    writer.finish().unwrap();
    let file = SafeTensors::open(&path).unwrap();
    for spec in &specs {
        assert!(file.get(&spec.name).unwrap().data == bytes_of(spec), "{}", spec.name);
    }
}

#[test]
fn a_writer_keeps_its_promise_or_leaves_nothing() {
    let dir = scratch("promise");
    let specs = [spec("a", DType::F32, &[4]), spec("b", DType::F32, &[4])];
    let path = dir.join("short.safetensors");
    let mut writer = SafeTensorsWriter::create(&path, &specs, &BTreeMap::new()).unwrap();
    writer.write(&[0; 20]).unwrap();
    says(writer.finish(), &["short.safetensors", "`b`", "16 bytes", "4 were"]);
    assert!(!path.exists());

    let path = dir.join("long.safetensors");
    let mut writer = SafeTensorsWriter::create(&path, &specs, &BTreeMap::new()).unwrap();
    says(writer.write(&[0; 35]), &["long.safetensors", "3 more bytes"]);
    drop(writer);
    assert!(!path.exists());

    let create = |specs: &[TensorSpec]| SafeTensorsWriter::create(&dir.join("y"), specs, &BTreeMap::new());
    says(create(&[specs[0].clone(), specs[0].clone()]), &["two tensors", "`a`"]);
    says(create(&[spec("__metadata__", DType::F32, &[1])]), &["reserved"]);
    says(create(&[spec("huge", DType::F32, &[usize::MAX, 2])]), &["`huge`", "too large"]);
    says(SafeTensorsWriter::create(&dir.join("no/dir/x"), &specs, &BTreeMap::new()), &["cannot create", "no/dir/x"]);
    SafeTensorsWriter::create(&dir.join("none"), &[], &BTreeMap::new()).unwrap().finish().unwrap();
    assert_eq!(SafeTensors::open(&dir.join("none")).unwrap().names().count(), 0);
}

fn small_file(dir: &Path) -> (PathBuf, Vec<u8>) {
    let path = dir.join("damaged.safetensors");
    write_mixed(&path, 1 << 20);
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

#[test]
fn no_truncation_is_overlooked() {
    let dir = scratch("truncated");
    let (path, small) = small_file(&dir);
    let real = fs::read(fixture("llama").join("model.safetensors")).unwrap();
    let cuts = (0..small.len()).map(|cut| &small[..cut]).chain((0..real.len()).step_by(64).map(|cut| &real[..cut]));
    for bytes in cuts {
        fs::write(&path, bytes).unwrap();
        says(SafeTensors::open(&path), &["damaged.safetensors", "copy the file again"]);
    }
    fs::write(&path, &real[..real.len() - 1]).unwrap();
    let end = format!("{} but the file ends at {}", real.len(), real.len() - 1);
    says(SafeTensors::open(&path), &["truncated: tensor `", &end]);
    let mut longer = real.clone();
    longer.push(0);
    fs::write(&path, longer).unwrap();
    says(SafeTensors::open(&path), &["appended"]);
}

#[test]
fn flipped_bytes_never_panic() {
    let dir = scratch("flipped");
    let (path, bytes) = small_file(&dir);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut random = Random(0x5EED);
    for round in 0..3000 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + round % 3 {
            damaged[random.below(header)] = random.next() as u8;
        }
        fs::write(&path, damaged).unwrap();
        match SafeTensors::open(&path) {
            Ok(file) => {
                let names: Vec<&str> = file.names().collect();
                assert!(names.iter().all(|name| file.get(name).is_some()));
            }
            Err(error) => assert!(!error.to_string().contains('\n')),
        }
    }
}

/// A file with this header and so many bytes of data.
fn open_header(header: &str, data: usize) -> Result<SafeTensors, strobe_model::ModelError> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    let path = scratch("header").join("h.safetensors");
    fs::write(&path, bytes).unwrap();
    SafeTensors::open(&path)
}

#[test]
fn every_lie_of_a_header_is_named() {
    let one = |entry: &str| format!("{{\"t\":{entry}}}");
    let full = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    assert!(open_header(&one(full), 8).is_ok());
    for (header, data, pieces) in [
        (one(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,8]}"#), 8, ["`t`", "needs 12 bytes", "give it 8"]),
        (one(r#"{"dtype":"F33","shape":[2],"data_offsets":[0,8]}"#), 8, ["`t`", "dtype", "F33"]),
        (one(r#"{"shape":[2],"data_offsets":[0,8]}"#), 8, ["`t`", "no", "`dtype`"]),
        (one(r#"{"dtype":"F32","data_offsets":[0,8]}"#), 8, ["`t`", "no", "`shape`"]),
        (one(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#), 8, ["`t`", "`shape`", "[-2]"]),
        (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#), 8, ["`t`", "backwards", "8..0"]),
        (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0]}"#), 8, ["`t`", "1 numbers", "2"]),
        (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[4,12]}"#), 12, ["`t`", "0..4", "no tensor"]),
        (
            one(r#"{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}"#),
            0,
            ["`t`", "shape", "too large"],
        ),
        (one("7"), 8, ["`t`", "`dtype`", "copy"]),
        (format!(r#"{{"t":{full},"t":{full}}}"#), 8, ["`t`", "listed", "twice"]),
        (
            format!(r#"{{"t":{full},"u":{{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}}}"#),
            8,
            ["`u`", "overlaps", "4 < 8"],
        ),
        (r#"{"__metadata__":{"a":1}}"#.to_string(), 0, ["__metadata__", "text", "copy"]),
        ("[]".to_string(), 0, ["damaged header", "object", "copy"]),
        ("{} {}".to_string(), 0, ["damaged header", "trailing", "copy"]),
    ] {
        says(open_header(&header, data), &pieces);
    }
}

#[test]
fn what_is_no_safetensors_file_at_all_is_said() {
    let path = scratch("foreign").join("f.safetensors");
    for (bytes, piece) in [
        (vec![], "0 bytes"),
        (vec![1, 2, 3], "3 bytes"),
        (vec![0xFF; 100], "18446744073709551615"),
        (b"PK\x03\x04\0\0\0\0 a zip file, say".to_vec(), "truncated: the header"),
        (b"\x02\0\0\0\0\0\0\0\xFF\xFE".to_vec(), "UTF-8"),
    ] {
        fs::write(&path, &bytes).unwrap();
        says(SafeTensors::open(&path), &["f.safetensors", piece]);
    }
    says(SafeTensors::open(&path.with_extension("gone")), &["cannot open", "f.gone"]);
}
