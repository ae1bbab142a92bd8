//! Logs with one JSON value per line, whose writer may have been killed in the middle of a line.

/// What a log holds.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonLines<T> {
    /// One value per whole line.
    pub records: Vec<T>,
    /// Whether the last line was cut off and dropped.
    pub cut: bool,
}

/// Reads every line with `read`. A last line without its line end that `read` refuses was cut off while it was written,
/// and is dropped. Any other line that `read` refuses is an error, with its number, counted from 1.
pub fn json_lines<T, E>(text: &[u8], mut read: impl FnMut(&str) -> Result<T, E>) -> Result<JsonLines<T>, (usize, E)> {
    let mut found = JsonLines { records: Vec::new(), cut: false };
    for (index, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let whole = line.strip_suffix(b"\n");
        match read(&String::from_utf8_lossy(whole.unwrap_or(line))) {
            Ok(record) => found.records.push(record),
            Err(_) if whole.is_none() => found.cut = true,
            Err(problem) => return Err((index + 1, problem)),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<JsonLines<u32>, usize> {
        json_lines(text.as_bytes(), str::parse).map_err(|(line, _)| line)
    }

    #[test]
    fn only_a_cut_last_line_is_dropped() {
        assert_eq!(read("1\n22\n"), Ok(JsonLines { records: vec![1, 22], cut: false }));
        assert_eq!(read("1\n22"), Ok(JsonLines { records: vec![1, 22], cut: false }));
        assert_eq!(read("1\n2x"), Ok(JsonLines { records: vec![1], cut: true }));
        assert_eq!(read(""), Ok(JsonLines { records: vec![], cut: false }));
        assert_eq!(read("1\n2x\n"), Err(2), "it has its end: it was written like this");
        assert_eq!(read("1\n\n3\n"), Err(2));
        let cut_in_a_letter = json_lines(b"1\n\"\xc3", |line| serde_json::from_str::<serde_json::Value>(line));
        assert!(cut_in_a_letter.is_ok_and(|found| found.cut && found.records.len() == 1));
    }
}
