//! The data of an explorer page as text: a JSON head and columns of variable-length integers, deflated, in base64.
//!
//! The columns follow the head in the order in which it names them: per side its tracks, then its iterations. Within a
//! track events stand by lane, then by start, and no two of a lane overlap, so that the page finds what is visible by
//! bisection. `js/data.js` reads what is written here.

use std::collections::{BinaryHeap, HashMap};
use std::io::Write;

use serde::Serialize;

use super::{Explorer, NONE, ReportTab, Side, Table, Track, TrackKind};
use crate::svg::palette::Color;
use crate::table::{Align, Cell};

/// JavaScript counts exactly up to here: 104 days in nanoseconds.
const LARGEST: i64 = (1 << 53) - 1;

#[derive(Serialize)]
struct Head<'a> {
    sides: Vec<SideHead<'a>>,
    pairs: &'a [(u32, u32)],
    kernels: Option<TableData<'a>>,
    reports: Vec<TabData<'a>>,
}

#[derive(Serialize)]
struct SideHead<'a> {
    name: &'a str,
    /// What page time 0 is in the trace. As text: it may be beyond what JavaScript counts exactly.
    origin: String,
    strings: &'a [String],
    categories: Vec<Named<'a>>,
    tracks: Vec<TrackHead<'a>>,
    iterations: IterationsHead<'a>,
}

#[derive(Serialize)]
struct Named<'a> {
    name: &'a str,
    /// The CSS variable of its color.
    color: String,
}

#[derive(Serialize)]
struct TrackHead<'a> {
    group: &'a str,
    name: &'a str,
    kind: TrackKind,
    unit: &'a str,
    /// Events per lane, or the number of samples.
    lanes: Vec<u32>,
    categories: bool,
    details: bool,
    correlations: bool,
    links: bool,
}

#[derive(Serialize)]
struct IterationsHead<'a> {
    count: usize,
    note: &'a str,
    kinds: Vec<Named<'a>>,
    parts: Vec<Named<'a>>,
    facts: &'a [String],
    texts: Vec<&'a str>,
}

#[derive(Serialize)]
struct TabData<'a> {
    name: &'a str,
    title: &'a str,
    notes: &'a [String],
    absent: Option<&'a str>,
    tables: Vec<TableData<'a>>,
}

#[derive(Serialize)]
struct TableData<'a> {
    title: &'a str,
    headers: &'a [String],
    right: Vec<bool>,
    rows: Vec<Vec<CellData<'a>>>,
    totals: Vec<Vec<CellData<'a>>>,
    find: &'a [usize],
}

#[derive(Serialize)]
#[serde(untagged)]
enum CellData<'a> {
    Text(&'a str),
    Number(&'a str, f64),
}

/// All data of a page.
pub(super) fn encode(page: &Explorer) -> String {
    let mut columns = Columns::default();
    let colors = page.colors();
    let head = Head {
        sides: page.sides.iter().map(|side| put_side(side, &colors, &mut columns)).collect(),
        pairs: &page.pairs,
        kernels: page.kernels.as_ref().map(table_data),
        reports: page.reports.iter().map(tab_data).collect(),
    };
    // Only maps with odd keys fail, and there are none.
    let head = serde_json::to_vec(&head).unwrap_or_default();
    let mut packed = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    let head_length = (head.len() as u32).to_le_bytes();
    let written = [&head_length[..], &head, &columns.0].iter().try_for_each(|part| packed.write_all(part));
    // Writing to memory cannot fail.
    base64(&written.and_then(|()| packed.finish()).unwrap_or_default())
}

fn tab_data(tab: &ReportTab) -> TabData<'_> {
    TabData {
        name: &tab.name,
        title: &tab.title,
        notes: &tab.notes,
        absent: tab.absent.as_deref(),
        tables: tab.tables.iter().map(table_data).collect(),
    }
}

fn table_data(table: &Table) -> TableData<'_> {
    let inner = &table.table;
    let rows = |total: bool| {
        let rows = inner.rows.iter().filter(move |row| row.total == total);
        rows.map(|row| row.cells.iter().map(cell_data).collect()).collect()
    };
    TableData {
        title: inner.title.as_deref().unwrap_or_default(),
        headers: &inner.headers,
        right: inner.align.iter().map(|align| *align == Align::Right).collect(),
        rows: rows(false),
        totals: rows(true),
        find: &table.event_names,
    }
}

fn cell_data(cell: &Cell) -> CellData<'_> {
    match cell.sort.filter(|value| value.is_finite()) {
        Some(value) => CellData::Number(&cell.text, value),
        None => CellData::Text(&cell.text),
    }
}

fn put_side<'a>(side: &'a Side, colors: &HashMap<&str, Color>, columns: &mut Columns) -> SideHead<'a> {
    let tracks: &[Track] = side.timeline.as_ref().map_or(&[], |timeline| &timeline.tracks);
    let origin = origin(side, tracks);
    let ordered: Vec<Ordered> = tracks.iter().map(Ordered::of).collect();
    let places = new_places(&ordered);
    let heads = tracks.iter().zip(&ordered).map(|(track, order)| put_track(track, order, &places, origin, columns));
    let tracks = heads.collect();
    let (strings, names): (&[String], &[String]) = match &side.timeline {
        Some(timeline) => (&timeline.strings, &timeline.categories),
        None => (&[], &[]),
    };
    let named = |names: &'a [String]| names.iter().map(|name| named(name, colors)).collect::<Vec<_>>();
    SideHead {
        name: &side.name,
        origin: origin.to_string(),
        strings,
        categories: named(names),
        tracks,
        iterations: put_iterations(side, named(&side.iterations.part_names), colors, origin, columns),
    }
}

fn named<'a>(name: &'a str, colors: &HashMap<&str, Color>) -> Named<'a> {
    Named { name, color: colors.get(name).unwrap_or(&Color::Unknown).variable() }
}

/// The earliest moment of a side.
fn origin(side: &Side, tracks: &[Track]) -> i64 {
    let events = tracks.iter().flat_map(|track| track.start.iter().copied());
    events.chain(side.iterations.cells.iter().map(|cell| cell.start)).min().unwrap_or(0)
}

fn since(origin: i64, time: i64) -> i64 {
    time.saturating_sub(origin).clamp(0, LARGEST)
}

/// The events of a track by lane, then by start.
struct Ordered {
    /// The events in their new order, by their old index.
    order: Vec<u32>,
    /// How many events each lane has.
    lanes: Vec<u32>,
}

impl Ordered {
    fn of(track: &Track) -> Self {
        if track.kind == TrackKind::Counter {
            let mut order: Vec<u32> = (0..track.start.len() as u32).collect();
            order.sort_by_key(|&i| track.start[i as usize]);
            return Self { lanes: vec![order.len() as u32], order };
        }
        let end = |i: u32| track.start[i as usize].saturating_add(track.duration_of(i as usize));
        let mut by_start: Vec<u32> = (0..track.start.len() as u32).collect();
        by_start.sort_by_key(|&i| (track.start[i as usize], std::cmp::Reverse(end(i))));

        // Each event takes the first lane that is free: nested ranges then lie below the one that holds them.
        let mut ends: BinaryHeap<(std::cmp::Reverse<i64>, u32)> = BinaryHeap::new();
        let mut free: BinaryHeap<std::cmp::Reverse<u32>> = BinaryHeap::new();
        let mut lanes: Vec<Vec<u32>> = Vec::new();
        for i in by_start {
            while let Some(&(std::cmp::Reverse(ended), lane)) = ends.peek() {
                if ended > track.start[i as usize] {
                    break;
                }
                ends.pop();
                free.push(std::cmp::Reverse(lane));
            }
            let lane = free.pop().map_or(lanes.len() as u32, |lane| lane.0);
            if lane as usize == lanes.len() {
                lanes.push(Vec::new());
            }
            lanes[lane as usize].push(i);
            ends.push((std::cmp::Reverse(end(i)), lane));
        }
        Self { lanes: lanes.iter().map(|lane| lane.len() as u32).collect(), order: lanes.concat() }
    }
}

/// Where every event of all tracks went, for links.
fn new_places(ordered: &[Ordered]) -> Vec<u32> {
    let mut places = vec![NONE; ordered.iter().map(|o| o.order.len()).sum()];
    let mut before = 0;
    for Ordered { order, .. } in ordered {
        for (new, &old) in order.iter().enumerate() {
            places[before + old as usize] = (before + new) as u32;
        }
        before += order.len();
    }
    places
}

fn put_track<'a>(
    track: &'a Track,
    ordered: &Ordered,
    places: &[u32],
    origin: i64,
    columns: &mut Columns,
) -> TrackHead<'a> {
    let order = || ordered.order.iter().map(|&i| i as usize);
    let counter = track.kind == TrackKind::Counter;
    let has = |length: usize| length > 0 && !counter;
    let head = TrackHead {
        group: &track.group,
        name: &track.name,
        kind: track.kind,
        unit: &track.unit,
        lanes: ordered.lanes.clone(),
        categories: has(track.category_ids.len()),
        details: has(track.detail_ids.len()),
        correlations: has(track.correlations.len()),
        links: has(track.links.len()),
    };
    columns.differences(order().map(|i| since(origin, track.start[i])));
    if counter {
        order().for_each(|i| columns.float(track.values.get(i).copied().unwrap_or(f64::NAN)));
        return head;
    }
    order().for_each(|i| columns.number(since(0, track.duration_of(i)) as u64));
    let optional = |column: &[u32], i: usize| column.get(i).copied().filter(|&id| id != NONE).map(u64::from);
    order().for_each(|i| columns.optional(optional(&track.name_ids, i)));
    if head.categories {
        order().for_each(|i| columns.optional(track.category_ids.get(i).map(|&id| u64::from(id))));
    }
    if head.details {
        order().for_each(|i| columns.optional(optional(&track.detail_ids, i)));
    }
    if head.correlations {
        columns
            .differences(order().map(|i| track.correlations.get(i).map_or(0, |&c| c.clamp(-LARGEST / 4, LARGEST / 4))));
    }
    if head.links {
        let target = |i: usize| track.links.get(i).and_then(|&old| places.get(old as usize)).copied();
        columns.differences(order().map(|i| target(i).filter(|&new| new != NONE).map_or(0, |new| i64::from(new) + 1)));
    }
    head
}

fn put_iterations<'a>(
    side: &'a Side,
    parts: Vec<Named<'a>>,
    colors: &HashMap<&str, Color>,
    origin: i64,
    columns: &mut Columns,
) -> IterationsHead<'a> {
    let iterations = &side.iterations;
    let cells = &iterations.cells;
    let mut kinds = Numbered::default();
    let mut texts = Numbered::default();
    columns.differences(cells.iter().map(|cell| since(origin, cell.start)));
    cells.iter().for_each(|cell| columns.number(since(0, cell.end.saturating_sub(cell.start)) as u64));
    cells.iter().for_each(|cell| columns.number(kinds.number(&cell.kind)));
    cells.iter().for_each(|cell| columns.number(texts.number(&cell.label)));
    for part in 0..parts.len() {
        let value = |cell: &super::IterationCell| cell.parts.get(part).copied().flatten();
        cells.iter().for_each(|cell| columns.optional(value(cell).map(|ns| since(0, ns) as u64)));
    }
    for fact in 0..iterations.fact_names.len() {
        let text = |cell: &'a super::IterationCell| cell.facts.get(fact).map_or("", String::as_str);
        cells.iter().for_each(|cell| columns.number(texts.number(text(cell))));
    }
    IterationsHead {
        count: cells.len(),
        note: &iterations.note,
        kinds: kinds.values.iter().map(|&name| named(name, colors)).collect(),
        parts,
        facts: &iterations.fact_names,
        texts: texts.values,
    }
}

/// Texts by number, in order of first appearance.
#[derive(Default)]
struct Numbered<'a> {
    numbers: HashMap<&'a str, u64>,
    values: Vec<&'a str>,
}

impl<'a> Numbered<'a> {
    fn number(&mut self, text: &'a str) -> u64 {
        *self.numbers.entry(text).or_insert_with(|| {
            self.values.push(text);
            self.values.len() as u64 - 1
        })
    }
}

/// Bytes of columns, one after the other.
#[derive(Default)]
struct Columns(Vec<u8>);

impl Columns {
    /// Seven bits a byte, the lowest first; the eighth says that more follow.
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// 0 for nothing, else the value plus one.
    fn optional(&mut self, value: Option<u64>) {
        self.number(value.map_or(0, |value| value.saturating_add(1)));
    }

    /// Each value as the difference to the one before, the sign in the lowest bit.
    fn differences(&mut self, values: impl Iterator<Item = i64>) {
        let mut before = 0;
        for value in values {
            let difference: i64 = value - before; // both are far from the ends of i64
            self.number(((difference << 1) ^ (difference >> 63)) as u64);
            before = value;
        }
    }

    fn float(&mut self, value: f64) {
        self.0.extend(value.to_le_bytes());
    }
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            match digit <= chunk.len() {
                true => text.push(char::from(DIGITS[(bits >> (18 - 6 * digit)) as usize & 63])),
                false => text.push('='),
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn base64_pads() {
        let cases = [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn nested_ranges_lie_below_the_one_that_holds_them() {
        let track = Track {
            start: vec![10, 0, 50, 12],
            duration: vec![20, 100, 10, 5],
            ..Track::new("", "", TrackKind::Ranges)
        };
        let ordered = Ordered::of(&track);
        assert_eq!(ordered.lanes, [1, 2, 1]);
        assert_eq!(ordered.order, [1, 0, 2, 3]);
    }

    proptest! {
        #[test]
        fn lanes_hold_every_event_once_and_never_overlap(
            events in prop::collection::vec((any::<i32>(), -5i64..1000), 0..200),
        ) {
            let track = Track {
                start: events.iter().map(|e| i64::from(e.0 % 2000)).collect(),
                duration: events.iter().map(|e| e.1).collect(),
                ..Track::new("g", "t", TrackKind::Ops)
            };
            let Ordered { order, lanes } = Ordered::of(&track);
            let mut seen = order.clone();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..events.len() as u32).collect::<Vec<_>>());
            let mut rest = &order[..];
            for lane in lanes {
                let (now, later) = rest.split_at(lane as usize);
                rest = later;
                for pair in now.windows(2) {
                    let (a, b) = (pair[0] as usize, pair[1] as usize);
                    prop_assert!(track.start[a] + track.duration_of(a) <= track.start[b]);
                }
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn no_time_and_no_index_breaks_the_encoder(
            start in prop::collection::vec(any::<i64>(), 0..20),
            other in prop::collection::vec(any::<i64>(), 0..20),
            ids in prop::collection::vec(any::<u32>(), 0..20),
        ) {
            let track = Track {
                start, duration: other.clone(), name_ids: ids.clone(), links: ids.clone(), detail_ids: ids,
                correlations: other, ..Track::new("g", "t", TrackKind::Calls)
            };
            let page = Explorer {
                sides: vec![Side {
                    timeline: Some(super::super::Timeline { tracks: vec![track], ..Default::default() }),
                    ..Default::default()
                }],
                ..Default::default()
            };
            prop_assert!(!encode(&page).is_empty());
        }
    }
}
