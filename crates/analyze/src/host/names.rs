//! Names of ranges and calls as people read them.

use std::borrow::Cow;

/// A name without what differs from machine to machine and from call to call: folders, line numbers and addresses of
/// Python functions, versions of calls.
pub(crate) fn plain(name: &str) -> Cow<'_, str> {
    if let Some(frame) = python_frame(name) {
        return Cow::Owned(frame);
    }
    match name.find(" at 0x") {
        Some(address) => {
            let rest = name[address + 6..].trim_start_matches(|c: char| c.is_ascii_hexdigit());
            let head = name[..address].trim_end_matches(" of type object").trim_end_matches(" object");
            Cow::Owned(format!("{head}{rest}"))
        }
        None => Cow::Borrowed(without_version(name)),
    }
}

/// `cudaGraphLaunch` of `cudaGraphLaunch_v10000`: as [`crate::nsys_stats`] does, but for versions of five digits too.
fn without_version(name: &str) -> &str {
    let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
    match head.strip_suffix("_v") {
        Some(call) if name.len() - head.len() >= 4 => call,
        _ => name,
    }
}

/// `path/file.py(12): function` without the folders in front of a package and without the line.
fn python_frame(name: &str) -> Option<String> {
    let (head, function) = name.split_once("): ")?;
    let path = head.trim_end_matches(|c: char| c.is_ascii_digit());
    let path = path.strip_suffix('(').filter(|_| path.len() < head.len())?;
    if !path.ends_with(".py") && !path.starts_with('<') {
        return None;
    }
    let package = ["site-packages/", "dist-packages/"].iter().find_map(|&at| path.rfind(at).map(|i| i + at.len()));
    let path = match package {
        Some(start) => &path[start..],
        // Of a file elsewhere its folder is nobody's business.
        None if path.starts_with('/') => path.rsplit('/').next().unwrap_or(path),
        None => path,
    };
    Some(format!("{path}: {function}"))
}

/// A name in which every number that stands apart from letters reads `N`: `layer_12` and `layer_13` are one, `conv2d` stays.
pub(crate) fn folded(name: &str) -> Cow<'_, str> {
    let bytes = name.as_bytes();
    if !bytes.iter().any(u8::is_ascii_digit) {
        return Cow::Borrowed(name);
    }
    let mut text = String::with_capacity(name.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes[at..].iter().take_while(|b| b.is_ascii_digit()).count();
        if digits == 0 {
            let next = bytes[at..].iter().position(u8::is_ascii_digit).map_or(bytes.len(), |n| at + n);
            text.push_str(&name[at..next]);
            at = next;
            continue;
        }
        let letter = |place: Option<&u8>| place.is_some_and(u8::is_ascii_alphabetic);
        let apart = !letter(at.checked_sub(1).and_then(|i| bytes.get(i))) && !letter(bytes.get(at + digits));
        text.push_str(if apart { "N" } else { &name[at..at + digits] });
        at += digits;
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_folders_lines_versions_and_addresses() {
        for (name, expected) in [
            (
                "/usr/lib/python3.10/site-packages/torch/utils/data/dataloader.py(633): __next__",
                "torch/utils/data/dataloader.py: __next__",
            ),
            ("/home/someone/train.py(12): main", "train.py: main"),
            ("threading.py(324): wait", "threading.py: wait"),
            (
                "<built-in method run_backward of torch._C._EngineBase object at 0x7f1a2b>",
                "<built-in method run_backward of torch._C._EngineBase>",
            ),
            ("<built-in method conv2d of type object at 0x7f35>", "<built-in method conv2d>"),
            ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
            ("cudaGraphLaunch_v10000", "cudaGraphLaunch"),
            ("cuMemAlloc_v2", "cuMemAlloc_v2"),
            ("load_batch", "load_batch"),
            ("<frozen os>(709): __getitem__", "<frozen os>: __getitem__"),
            ("loss (3): mean", "loss (3): mean"),
            ("strange.py(", "strange.py("),
        ] {
            assert_eq!(plain(name), expected, "{name}");
        }
    }

    #[test]
    fn numbers_that_stand_apart_fold() {
        for (name, expected) in [
            ("layer_12", "layer_N"),
            ("batch 3 of 10", "batch N of N"),
            ("aten::conv2d", "aten::conv2d"),
            ("int8 gemm", "int8 gemm"),
            ("größe 7", "größe N"),
            ("7", "N"),
        ] {
            assert_eq!(folded(name), expected, "{name}");
        }
    }
}
