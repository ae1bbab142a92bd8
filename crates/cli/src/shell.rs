//! Commands as a person would type them.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::process::Command;

/// A command with the variables set for it, in the words of a POSIX shell.
pub(crate) fn line(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        // No quotes around the name: it would not be taken for one.
        Some(format!("{}={}", name.to_string_lossy(), quoted(value?)))
    });
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(|word| quoted(word).into_owned());
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// The word as it is if no shell reads anything into it, else in quotes.
fn quoted(word: &OsStr) -> Cow<'_, str> {
    let word = word.to_string_lossy();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=+,./:@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word;
    }
    format!("'{}'", word.replace('\'', r"'\''")).into()
}

/// The words of a line, as a POSIX shell splits them: blanks separate, quotes and backslashes keep. Nothing is expanded.
pub(crate) fn words(line: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ' ' | '\t' | '\n' => words.extend(word.take()),
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next() {
                        None => return Err(format!("`{line}`: a quote {letter} is not closed")),
                        Some(end) if end == letter => break,
                        Some('\\') if letter == '"' => word.extend(letters.next()),
                        Some(inside) => word.push(inside),
                    }
                }
            }
            '\\' => match letters.next() {
                Some(kept) => word.get_or_insert_default().push(kept),
                None => return Err(format!("`{line}`: nothing follows the backslash at its end")),
            },
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_as_a_shell_does() {
        let split = |line| words(line).unwrap();
        assert_eq!(split("--a b  'c d' \"e f\" g\\ h"), ["--a", "b", "c d", "e f", "g h"]);
        assert_eq!(split("--x='' \"a\\\"b\""), ["--x=", "a\"b"]);
        assert!(split("  ").is_empty());
        assert!(words("'open").unwrap_err().contains("not closed"));
        assert!(words("end\\").is_err());
    }

    #[test]
    fn only_what_a_shell_would_change_is_quoted() {
        let mut command = Command::new("/opt/nsys");
        command.args(["-t", "cuda,nvtx", "--sample=none", "", "a b", "it's", "$HOME", "~", "*.json", "a\nb", "Ü"]);
        command.env("WINDOWS", "1-2,4").env("SPACED", "a b");
        assert_eq!(
            line(&command),
            r"SPACED='a b' WINDOWS=1-2,4 /opt/nsys -t cuda,nvtx --sample=none '' 'a b' 'it'\''s' '$HOME' '~' '*.json' 'a
b' 'Ü'"
        );
    }

    #[test]
    fn a_shell_reads_the_same_words() {
        let words = ["", "a b", "it's", "\"", "\\", "$HOME `ls` $(ls)", "a;b|c&d<e>f", "#", "!", "=x", "a\nb", "{a,b}"];
        let mut command = Command::new("printf");
        command.arg("%s|").args(words);
        let shell = Command::new("sh").arg("-c").arg(line(&command)).output().unwrap();
        let expected: String = words.iter().map(|word| format!("{word}|")).collect();
        assert_eq!(String::from_utf8_lossy(&shell.stdout), expected);
    }
}
