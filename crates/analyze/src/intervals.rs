//! Sets of moments: unions, differences and lengths of spans of time.

/// A span of time, `start <= end`, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// When it begins.
    pub start: i64,
    /// When it ends (exclusive).
    pub end: i64,
}

impl Span {
    /// A span; empty when `end` is before `start`.
    pub fn new(start: i64, end: i64) -> Self {
        Self { start, end: end.max(start) }
    }

    /// Its length.
    pub fn length(self) -> i64 {
        self.end.saturating_sub(self.start)
    }

    /// What it has in common with another, if anything of positive length.
    pub fn overlap(self, other: Span) -> Option<Span> {
        let both = Span { start: self.start.max(other.start), end: self.end.min(other.end) };
        (both.start < both.end).then_some(both)
    }
}

/// Disjoint, non-touching, non-empty spans in order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpanSet(Vec<Span>);

impl SpanSet {
    /// No moment.
    pub const EMPTY: SpanSet = SpanSet(Vec::new());

    /// The union of spans in any order.
    pub fn union_of(spans: impl IntoIterator<Item = Span>) -> Self {
        let mut spans: Vec<Span> = spans.into_iter().filter(|s| s.start < s.end).collect();
        if !spans.is_sorted_by_key(|s| s.start) {
            spans.sort_by_key(|s| s.start); // stable, which is linear for a few runs one behind the other
        }
        spans.dedup_by(|span, last| {
            let touches = span.start <= last.end;
            if touches {
                last.end = last.end.max(span.end);
            }
            touches
        });
        Self(spans)
    }

    /// The spans.
    pub fn spans(&self) -> &[Span] {
        &self.0
    }

    /// Whether it holds no moment.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The time it covers.
    pub fn length(&self) -> i64 {
        self.0.iter().map(|s| s.length()).sum()
    }

    /// From the first moment to the last.
    pub fn extent(&self) -> Option<Span> {
        Some(Span { start: self.0.first()?.start, end: self.0.last()?.end })
    }

    /// What lies in both.
    pub fn intersect(&self, other: &SpanSet) -> SpanSet {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&x), Some(&&y)) = (a.peek(), b.peek()) {
            both.extend(x.overlap(y));
            if x.end <= y.end {
                a.next()
            } else {
                b.next()
            };
        }
        SpanSet(both)
    }

    /// What lies in this and not in the other.
    pub fn subtract(&self, other: &SpanSet) -> SpanSet {
        let mut rest = Vec::new();
        // A few spans may be cut by a set of millions.
        let from = self.0.first().map_or(i64::MAX, |span| span.start);
        let mut cuts = &other.0[other.0.partition_point(|cut| cut.end <= from)..];
        for &span in &self.0 {
            let mut from = span.start;
            while let Some(cut) = cuts.first() {
                if cut.end <= from {
                    cuts = &cuts[1..];
                    continue;
                }
                if cut.start >= span.end {
                    break;
                }
                if cut.start > from {
                    rest.push(Span { start: from, end: cut.start });
                }
                from = cut.end;
                if cut.end > span.end {
                    break;
                }
                cuts = &cuts[1..];
            }
            if from < span.end {
                rest.push(Span { start: from, end: span.end });
            }
        }
        SpanSet(rest)
    }

    /// What lies in either.
    pub fn union(&self, other: &SpanSet) -> SpanSet {
        Self::union_of(self.0.iter().chain(&other.0).copied())
    }

    /// The part inside a span.
    pub fn clip(&self, to: Span) -> SpanSet {
        let first = self.0.partition_point(|s| s.end <= to.start);
        let inside = self.0[first..].iter().take_while(|s| s.start < to.end);
        SpanSet(inside.filter_map(|s| s.overlap(to)).collect())
    }

    /// How much of a span it covers.
    pub fn covered(&self, of: Span) -> i64 {
        let first = self.0.partition_point(|s| s.end <= of.start);
        let inside = self.0[first..].iter().take_while(|s| s.start < of.end);
        inside.filter_map(|s| s.overlap(of)).map(Span::length).sum()
    }

    /// What of `within` it does not cover.
    pub fn gaps(&self, within: Span) -> SpanSet {
        Self::union_of([within]).subtract(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(spans: &[(i64, i64)]) -> SpanSet {
        SpanSet::union_of(spans.iter().map(|&(s, e)| Span::new(s, e)))
    }

    fn moments(set: &SpanSet) -> Vec<i64> {
        (-5..70).filter(|t| set.spans().iter().any(|s| s.start <= *t && *t < s.end)).collect()
    }

    proptest! {
        #[test]
        fn operations_agree_with_single_moments(
            a in prop::collection::vec((0i64..50, 0i64..15), 0..12),
            b in prop::collection::vec((0i64..50, 0i64..15), 0..12),
            (from, length) in (0i64..50, 0i64..20),
        ) {
            let make = |v: &[(i64, i64)]| set(&v.iter().map(|&(s, l)| (s, s + l)).collect::<Vec<_>>());
            let (a, b, span) = (make(&a), make(&b), Span::new(from, from + length));
            let (in_a, in_b) = (moments(&a), moments(&b));
            let keep = |f: &dyn Fn(i64) -> bool| (-5..70).filter(|&t| f(t)).collect::<Vec<i64>>();
            let inside = |t: i64| span.start <= t && t < span.end;
            prop_assert_eq!(a.length(), in_a.len() as i64);
            prop_assert_eq!(moments(&a.intersect(&b)), keep(&|t| in_a.contains(&t) && in_b.contains(&t)));
            prop_assert_eq!(moments(&a.subtract(&b)), keep(&|t| in_a.contains(&t) && !in_b.contains(&t)));
            prop_assert_eq!(moments(&a.union(&b)), keep(&|t| in_a.contains(&t) || in_b.contains(&t)));
            prop_assert_eq!(moments(&a.clip(span)), keep(&|t| in_a.contains(&t) && inside(t)));
            prop_assert_eq!(a.covered(span), a.clip(span).length());
            prop_assert_eq!(moments(&a.gaps(span)), keep(&|t| !in_a.contains(&t) && inside(t)));
            for set in [a.intersect(&b), a.subtract(&b), a.union(&b)] {
                prop_assert!(set.spans().windows(2).all(|w| w[0].end < w[1].start || w[0].end <= w[1].start));
            }
        }
    }
}
