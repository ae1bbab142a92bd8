//! Names at a given width: two names that differ never look the same.

use super::normalize::{base_name, is_memory_name};

/// How long a kernel's name may be in a sentence.
const NAME_LENGTH: usize = 60;

/// How much of the common ending is worth showing behind the difference.
const ENDING: usize = 8;

/// From this room on, the beginning of a common prefix is shown too.
const ROOM_FOR_BEGINNING: usize = 15;

/// Returns a kernel's name for a sentence: the function alone, both ends of it where it is long.
pub(super) fn short(name: &str) -> String {
    cut(&plain(name))
}

/// Returns two kernels' names for a sentence. They differ if the names do: where the functions are the same, their
/// arguments are shown.
pub(super) fn short_pair(a: &str, b: &str) -> (String, String) {
    let [a, b] = telling(a, b);
    let [a, b] = pair(&a, &b, [NAME_LENGTH; 2]);
    (a, b)
}

/// Returns what to show of two kernels' names where width is no concern: the functions alone if these differ, the whole
/// names otherwise.
pub(super) fn telling(a: &str, b: &str) -> [String; 2] {
    let plain = [plain(a), plain(b)];
    if a == b || plain[0] != plain[1] {
        return plain;
    }
    match [a, b].map(|name| name.strip_prefix("void ").unwrap_or(name)) {
        [bare_a, bare_b] if bare_a != bare_b => [bare_a, bare_b].map(str::to_owned),
        _ => [a, b].map(str::to_owned),
    }
}

/// Returns the name to show of each side's kernels: the first that the other side lacks, else the first.
pub(super) fn unlike<'a>(a: &'a [String], b: &'a [String]) -> [Option<&'a str>; 2] {
    [(a, b), (b, a)].map(|(own, other)| {
        let lacking = own.iter().find(|name| !other.contains(name));
        lacking.or(own.first()).map(String::as_str)
    })
}

/// Returns a name of at most [`NAME_LENGTH`] characters, with both of its ends.
pub(super) fn cut(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    ends(&letters, NAME_LENGTH * 2 / 3, NAME_LENGTH)
}

/// The function alone; all of a name that has none.
fn plain(name: &str) -> String {
    let specialised = name.contains(['<', '(']) && !is_memory_name(name);
    if specialised { base_name(name) } else { name.to_owned() }
}

/// Returns two names in at most so many characters each. What differs stays: prefix and suffix that both have collapse to
/// `…` alike, so the results differ whenever the names do. Widths below 4 keep only a part of that promise.
#[must_use]
pub fn pair(a: &str, b: &str, widths: [usize; 2]) -> [String; 2] {
    let letters = [a, b].map(|name| name.chars().collect::<Vec<char>>());
    let [a, b] = &letters;
    if a.len() <= widths[0] && b.len() <= widths[1] {
        return letters.map(String::from_iter);
    }
    let prefix = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let suffix = a[prefix..].iter().rev().zip(b[prefix..].iter().rev()).take_while(|(a, b)| a == b).count();
    // What a side needs from the first difference on: at most two thirds of its width.
    let room = |side: usize| {
        let (width, differs) = (widths[side], letters[side].len() - prefix - suffix);
        width - (differs + suffix.min(ENDING)).min(width * 2 / 3)
    };
    let beginning = collapsed_prefix(&a[..prefix], room(0).min(room(1)));
    [0, 1].map(|side| {
        let rest = &letters[side][prefix..];
        let (room, differs) = (widths[side].saturating_sub(beginning.chars().count()), rest.len() - suffix);
        let kept = if differs + 2 <= room { differs + (room - differs) * 2 / 3 } else { room * 2 / 3 };
        format!("{beginning}{}", ends(rest, kept.max(1), room))
    })
}

/// The end of a prefix, which leads to the difference, and its beginning where there is room for both.
fn collapsed_prefix(prefix: &[char], room: usize) -> String {
    let first = if room >= ROOM_FOR_BEGINNING { room / 3 } else { 0 };
    ends(prefix, first, room)
}

/// At most `room` characters: the first `first` ones, `…`, and as much of the end as fits.
fn ends(letters: &[char], first: usize, room: usize) -> String {
    if letters.len() <= room {
        return letters.iter().collect();
    }
    let Some(room) = room.checked_sub(1) else { return String::new() };
    let first = first.min(room);
    let last = letters.len() - (room - first);
    letters[..first].iter().chain(&['…']).chain(&letters[last..]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sides(width: usize, a: &str, b: &str) -> [String; 2] {
        pair(a, b, [width; 2])
    }

    const HOPPER: &str = "cutlass::gemm::kernel::GemmUniversal<cutlass::arch::Sm90, cutlass::TmaKernel<128x128x64, bf16, cooperative>, float>";

    #[test]
    fn what_differs_stays() {
        let other = HOPPER.replace("128x128x64", "128x256x64");
        assert_eq!(
            sides(40, HOPPER, &other),
            ["cutlass::…ass::TmaKernel<128x128x64, …t>", "cutlass::…ass::TmaKernel<128x256x64, …t>"]
        );
        let [a, b] = sides(20, HOPPER, &other);
        assert!(a.contains("12") && b.contains("25") && a != b, "{a} {b}");
        // A difference at the end, one at the beginning, one that one side lacks.
        let long = "k".repeat(70);
        assert_eq!(sides(12, &format!("{long}_f16"), &format!("{long}_bf16")), ["…kkkkkk_f16", "…kkkkkk_bf16"]);
        assert_eq!(sides(12, &format!("a{long}"), &format!("b{long}")), ["akkkkkkk…kkk", "bkkkkkkk…kkk"]);
        let [a, b] = sides(12, &long, &format!("{long}_splitk"));
        assert!(b.ends_with("_splitk") && !a.contains('s'), "{a} {b}");
    }

    #[test]
    fn sentences_name_what_tells_two_variants_apart() {
        let (a, b) = short_pair(HOPPER, &HOPPER.replace("128x128x64", "128x256x64"));
        assert!(a.contains("<128x128x64") && b.contains("<128x256x64"), "{a} {b}");
        assert_eq!(short_pair("void foo<int>(int)", "void bar<int>(int)"), ("foo".into(), "bar".into()));
        assert_eq!(short("void foo<int>(int)"), "foo");
        let long = format!("{}_tail", "x".repeat(100));
        assert_eq!((cut(&long).chars().count(), cut(&long).ends_with("_tail")), (NAME_LENGTH, true));
    }

    /// Two names from one or two edits of a third: far apart, near, one inside the other.
    fn names() -> impl Strategy<Value = (String, String)> {
        let piece = || prop_oneof!["[a-c<>, :_0-9…]{0,90}", "[a-z]{0,6}"];
        (piece(), piece(), piece(), piece(), piece()).prop_map(|(head, a, b, middle, tail)| {
            (format!("{head}{a}{middle}{a}{tail}"), format!("{head}{b}{middle}{tail}"))
        })
    }

    proptest! {
        #[test]
        fn names_that_differ_look_different((a, b) in names(), wide in 40..120_usize, other in 40..120_usize, narrow in 4..40_usize) {
            for widths in [[wide; 2], [wide, other], [narrow; 2], [narrow, other]] {
                let [shown_a, shown_b] = pair(&a, &b, widths);
                prop_assert_eq!(shown_a == shown_b, a == b, "{:?}: {:?} {:?}", widths, shown_a, shown_b);
                prop_assert!(shown_a.chars().count() <= widths[0] && shown_b.chars().count() <= widths[1]);
                prop_assert_eq!(pair(&b, &a, [widths[1], widths[0]]), [shown_b, shown_a]);
            }
            let (short_a, short_b) = short_pair(&a, &b);
            prop_assert_eq!(short_a == short_b, a == b);
        }
    }
}
