//! Reports as text: tables for people, CSV and JSON for programs.

use std::borrow::Cow;

use serde_json::{Map, Value as Json, json};
use strobe_analyze::compare::names;
use strobe_analyze::nsys_stats;
use strobe_analyze::sheet::{Column, NamedUnit, Report, Role, Sheet, Unit, Value};
use strobe_report::human;
use strobe_report::table::{Cell, Table};
use strobe_report::terminal;

/// What separates a report from the one before it on a terminal.
const RULE: &str = "═";

/// Tables with a sum up to this many rows are never cut.
const WHOLE: usize = 24;

/// How reports are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// Plain values; Nsight Systems' summaries exactly as `nsys stats` writes them
    Csv,
    /// For programs
    Json,
}

/// A report for the terminal: at most `top` rows of each table, 0 for all.
pub(crate) fn text(report: &Report, width: usize, top: usize) -> String {
    let report = &printable(report);
    let title = wrap(&report.title, width);
    let underlined = title.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    let mut out = format!("{title}{}\n", RULE.repeat(underlined));
    if let Some(why) = &report.not_applicable {
        out.push_str(&wrap(&format!("Not applicable: {why}"), width));
    }
    let notes: String = report.notes.iter().map(|note| wrap(note, width)).collect();
    let verdict_first = report.name == "compare";
    if verdict_first {
        out.push_str(&format!("{notes}\n"));
    }
    let mut sheets = report.sheets.as_slice();
    if report.name == "advice"
        && let [findings, evidence @ ..] = sheets
    {
        out.push_str(&paragraphs(findings, width));
        out.push('\n');
        sheets = evidence;
    }
    for (index, sheet) in sheets.iter().filter(|sheet| !sheet.rows.is_empty()).enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if !sheet.title.is_empty() {
            out.push_str(&wrap(&sheet.title, width));
        }
        // A table with a sum below it is shown whole, or the sum would be of rows that nobody sees.
        let top = if sheet.total.is_some() && sheet.rows.len() <= WHOLE { 0 } else { top };
        let (fitted, left_out) = fitted(sheet, width, top);
        out.push_str(&fitted.render(width));
        if top > 0 && sheet.rows.len() > top {
            out.push_str(&format!("… {}, --top 0 shows all\n", more_rows(sheet.rows.len() - top)));
        }
        if !left_out.is_empty() {
            out.push_str(&wrap(&format!("Not shown at this width: {}.", left_out.join(", ")), width));
        }
    }
    if !verdict_first {
        out.push_str(&notes);
    }
    out
}

/// The report with what names of a trace hold beyond letters shown, so that a terminal does not obey it.
fn printable(report: &Report) -> Report {
    let text = |text: &mut String| {
        if let Cow::Owned(escaped) = terminal::escaped(text) {
            *text = escaped;
        }
    };
    let mut report = report.clone();
    report.notes.iter_mut().chain(&mut report.not_applicable).for_each(text);
    for sheet in &mut report.sheets {
        text(&mut sheet.title);
        sheet.columns.iter_mut().for_each(|column| text(&mut column.name));
        for value in sheet.rows.iter_mut().chain(&mut sheet.total).flatten() {
            if let Value::Text(name) = value {
                text(name);
            }
        }
    }
    report
}

fn more_rows(count: usize) -> String {
    format!("{} more {}", human::count(count as u64), if count == 1 { "row" } else { "rows" })
}

/// Findings are sentences: a paragraph each, not a row.
fn paragraphs(findings: &Sheet, width: usize) -> String {
    let mut out = String::new();
    for (number, row) in findings.rows.iter().enumerate() {
        let cell = |name: &str| {
            let place = findings.columns.iter().position(|column| column.name == name);
            match place.and_then(|place| row.get(place)) {
                Some(Value::Text(text)) => text.as_str(),
                _ => "",
            }
        };
        let text = format!("{}. [{}] {}. {}", number + 1, cell("Severity"), cell("Finding"), cell("What to do"));
        out.push_str(&wrap(&text, width));
    }
    out
}

/// A name cut shorter than this tells little.
const READABLE: usize = 44;
/// A name cut shorter than this tells nothing.
const LEGIBLE: usize = 16;
/// Columns that give way, the first to go first, when names would be cut shorter than this. Those of A and B go together, and
/// so do both ends of an interval, the last of all.
const LEAST_NEEDED: [(Option<Role>, usize); 15] = [
    (Some(Role::Deviation), READABLE),
    (Some(Role::Lowest), READABLE),
    (Some(Role::LowerQuartile), READABLE),
    (Some(Role::UpperQuartile), READABLE),
    (Some(Role::MostBelow), READABLE),
    (Some(Role::Highest), READABLE),
    (Some(Role::Mean), READABLE),
    (Some(Role::Process), LEGIBLE),
    (Some(Role::Start), LEGIBLE),
    (Some(Role::End), LEGIBLE),
    (Some(Role::How), LEGIBLE),
    (Some(Role::Style), LEGIBLE),
    (Some(Role::Launches), LEGIBLE),
    (Some(Role::Kernels), LEGIBLE),
    (None, LEGIBLE),
];

/// The table of a sheet with as many columns as leave room for names, and the headers of those left out.
fn fitted(sheet: &Sheet, width: usize, top: usize) -> (Table, Vec<String>) {
    let mut sheet = without_zeros(sheet);
    sheet.title.clear();
    same_names_once(&mut sheet);
    let mut left_out = Vec::new();
    let mut remove = |sheet: &mut Sheet, place: usize, why: &str| {
        left_out.push(sheet.columns[place].header().to_owned() + why);
        drop_column(sheet, place);
    };
    let fits = |sheet: &Sheet, readable: usize| table(sheet, top).fits(width, readable);
    let mut place = 0;
    while place < sheet.columns.len() && !fits(&sheet, READABLE) {
        match always(&sheet, place) {
            Some(value) => remove(&mut sheet, place, &value),
            None => place += 1,
        }
    }
    for (role, readable) in LEAST_NEEDED {
        let is_it = |column: &Column| role.map_or(column.unit.is_interval(), |role| column.role == role);
        while let Some(place) = sheet.columns.iter().position(is_it).filter(|_| !fits(&sheet, readable)) {
            with_other_side(&sheet, place).into_iter().rev().for_each(|place| remove(&mut sheet, place, ""));
        }
    }
    let least = |column: &Column| column.unit != Unit::Text && column.name != "Change";
    while let Some(place) = sheet.columns.iter().rposition(least).filter(|_| !fits(&sheet, LEGIBLE)) {
        with_other_side(&sheet, place).into_iter().rev().for_each(|place| remove(&mut sheet, place, ""));
    }
    let pairs = shorten_names(&mut sheet);
    tell_apart(&mut sheet, &pairs, width, top);
    (table_of(&sheet, top, false), left_out)
}

/// Takes a column out.
pub(crate) fn drop_column(sheet: &mut Sheet, place: usize) {
    sheet.columns.remove(place);
    sheet.rows.iter_mut().chain(&mut sheet.total).for_each(|row| drop(row.remove(place)));
}

/// A column and, of a number of A or of B, the other side's, in order: one alone compares nothing.
fn with_other_side(sheet: &Sheet, place: usize) -> Vec<usize> {
    let name = sheet.columns[place].name.as_str();
    let other = match (name.strip_suffix(" A"), name.strip_suffix(" B")) {
        (Some(what), _) => format!("{what} B"),
        (_, Some(what)) => format!("{what} A"),
        _ => return vec![place],
    };
    let is_it = |column: &Column| column.unit == sheet.columns[place].unit && column.name == other;
    let mut both: Vec<usize> = sheet.columns.iter().position(is_it).into_iter().chain([place]).collect();
    both.sort_unstable();
    both
}

/// Columns of words for A and for B, such as `Kernel A` and `Kernel B`.
fn pairs_of_names(sheet: &Sheet) -> Vec<(usize, usize)> {
    let words = || sheet.columns.iter().enumerate().filter(|(_, column)| column.unit == Unit::Text);
    let other = |name: &str| words().find(|(_, column)| column.name == format!("{name} B")).map(|(place, _)| place);
    words().filter_map(|(a, column)| Some((a, other(column.name.strip_suffix(" A")?)?))).collect()
}

/// Shortens names as [`short_name`] does, except those of A and B that would become the same. Returns the columns of A
/// and B.
fn shorten_names(sheet: &mut Sheet) -> Vec<(usize, usize)> {
    let pairs = pairs_of_names(sheet);
    for row in sheet.rows.iter_mut().chain(&mut sheet.total) {
        let short: Vec<Value> = row
            .iter()
            .map(|value| match value {
                Value::Text(text) => short_name(text).into(),
                other => other.clone(),
            })
            .collect();
        let alike: Vec<usize> =
            pairs.iter().filter(|(a, b)| short[*a] == short[*b]).flat_map(|(a, b)| [*a, *b]).collect();
        for (place, short) in short.into_iter().enumerate().filter(|(place, _)| !alike.contains(place)) {
            row[place] = short;
        }
    }
    pairs
}

/// Shortens the names of A and B to the widths that their columns will have, so that what differs stays.
fn tell_apart(sheet: &mut Sheet, pairs: &[(usize, usize)], width: usize, top: usize) {
    let whole = sheet.rows.clone();
    // Shorter names may leave headers more room, and columns other widths than before: those are tried again.
    for _ in 0..8 {
        let widths = table_of(sheet, top, false).column_widths(width);
        let mut fit = true;
        for (row, whole) in sheet.rows.iter_mut().zip(&whole) {
            for &(a, b) in pairs {
                let [Value::Text(shown_a), Value::Text(shown_b)] = [&row[a], &row[b]] else { continue };
                let [Value::Text(name_a), Value::Text(name_b)] = [&whole[a], &whole[b]] else { continue };
                if shown_a.chars().count() > widths[a] || shown_b.chars().count() > widths[b] {
                    fit = false;
                    let [name_a, name_b] = names::pair(name_a, name_b, [widths[a], widths[b]]);
                    (row[a], row[b]) = (name_a.into(), name_b.into());
                }
            }
        }
        if fit {
            return;
        }
    }
}

/// What a column says in every row, if that is nothing or the same words.
fn always(sheet: &Sheet, column: usize) -> Option<String> {
    let mut values = sheet.rows.iter().map(|row| &row[column]);
    let first = values.next()?;
    let same = values.all(|value| value == first);
    match first {
        Value::Unknown if same => Some(" (not known)".to_owned()),
        Value::Text(text) if same && text.is_empty() => Some(" (nothing in any row)".to_owned()),
        Value::Text(text) if same && sheet.rows.len() > 1 => Some(format!(" ({text} in all rows)")),
        Value::Int(id) if same && sheet.rows.len() > 1 && sheet.columns[column].unit == Unit::Id => {
            Some(format!(" ({id} in all rows)"))
        }
        _ => None,
    }
}

/// What stands for a second name that is the same.
const SAME: &str = "the same";

/// Two names of one kernel leave each other little room: a second one that is the same is not repeated.
fn same_names_once(sheet: &mut Sheet) {
    let place = |name: &str| sheet.columns.iter().position(|column| column.name == name);
    let (Some(a), Some(b)) = (place("Kernel A"), place("Kernel B")) else { return };
    for row in sheet.rows.iter_mut().filter(|row| row[a] == row[b] && row[a] != Value::Unknown) {
        row[b] = Value::Text(SAME.to_owned());
    }
}

/// A sheet as a table: numbers with units that fit, names shortened as far as they stay recognisable.
pub(crate) fn table(sheet: &Sheet, top: usize) -> Table {
    table_of(sheet, top, true)
}

/// A sheet as a table with all its rows and full names, for a page.
pub(crate) fn page_table(sheet: &Sheet) -> Table {
    table_of(sheet, 0, false)
}

/// A sheet for people: without the columns that say nothing but zero, where they may be hidden.
pub(crate) fn without_zeros(sheet: &Sheet) -> Sheet {
    let mut sheet = sheet.clone();
    let zero =
        |value: &Value| matches!(value, Value::Int(0)) || matches!(value, Value::Float(number) if *number == 0.0);
    for place in (0..sheet.columns.len()).rev() {
        let mut values = sheet.rows.iter().map(|row| &row[place]);
        if sheet.columns[place].may_hide && values.all(zero) {
            drop_column(&mut sheet, place);
        }
    }
    sheet
}

fn table_of(sheet: &Sheet, top: usize, short_names: bool) -> Table {
    let mut table = Table::new(sheet.columns.iter().map(|column| column.header().to_owned()));
    if !sheet.title.is_empty() {
        table = table.title(&sheet.title);
    }
    let shown = if top == 0 { sheet.rows.len() } else { top };
    for (index, column) in sheet.columns.iter().enumerate() {
        table = if column.unit == Unit::Text { table.left(index) } else { table.right(index) };
    }
    let words = sheet.columns.iter().enumerate().filter(|(_, column)| column.unit == Unit::Text);
    table = table.flexible_columns(words.map(|(index, _)| index));
    for row in sheet.rows.iter().take(shown) {
        table.push(cells(sheet, row, short_names));
    }
    match &sheet.total {
        Some(total) => table.total(cells(sheet, total, short_names)),
        None => table,
    }
}

fn cells(sheet: &Sheet, row: &[Value], short_names: bool) -> Vec<Cell> {
    let shown = row.iter().zip(&sheet.columns).map(|(value, column)| match value {
        Value::Text(text) if short_names => Cell::from(short_name(text)),
        _ => cell(value, column.unit),
    });
    shown.collect()
}

/// The same report with moments counted from `origin`, the start of the trace: a time of day or of boot tells nobody where
/// to look.
pub(crate) fn relative_to(mut report: Report, origin: i64) -> Report {
    for sheet in &mut report.sheets {
        let moments = sheet.columns.iter().map(|column| column.unit == Unit::Moment).collect::<Vec<_>>();
        for row in sheet.rows.iter_mut().chain(&mut sheet.total) {
            for (value, _) in row.iter_mut().zip(&moments).filter(|(_, moment)| **moment) {
                if let Value::Int(time) = value {
                    *time = time.saturating_sub(origin);
                }
            }
        }
    }
    report
}

/// A value as people read it; cells carry their numbers, so that pages sort by value and not by text.
pub(crate) fn cell(value: &Value, unit: Unit) -> Cell {
    let number = match value {
        Value::Unknown if unit == Unit::Text => return Cell::from(""),
        Value::Unknown => return Cell::from(human::NOT_KNOWN),
        Value::Text(text) => return Cell::from(text.as_str()),
        Value::Int(number) => *number as f64,
        Value::Float(number) => *number,
        // Pages sort intervals by their low ends.
        Value::Interval(low, high) => {
            let text = match unit {
                Unit::ShareInterval => human::percent_interval(*low, *high),
                _ => human::ns_interval(*low, *high),
            };
            return Cell::number(text, *low);
        }
    };
    let signed = |text: String| if number > 0.0 { format!("+{text}") } else { text };
    let text = match unit {
        Unit::Count => match value {
            Value::Int(number) if *number >= 0 => human::count(*number as u64),
            Value::Int(number) => format!("-{}", human::count(number.unsigned_abs())),
            _ => human::number(number),
        },
        Unit::Id => number.to_string(),
        Unit::Ns => human::ns(number),
        Unit::Moment => format!("{:.3} ms", number / 1e6),
        Unit::NsChange => signed(human::ns(number)),
        Unit::Bytes if number < 0.0 => format!("-{}", human::bytes(number.abs() as u64)),
        Unit::Bytes => human::bytes(number as u64),
        Unit::BytesPerS => human::bytes_per_s(number),
        Unit::FlopsPerS => human::flops_per_s(number),
        Unit::Share => human::percent(number),
        Unit::ShareChange => signed(human::percent(number)),
        // A single number where an interval should be: shown as what it is.
        Unit::NsInterval => signed(human::ns(number)),
        Unit::ShareInterval => signed(human::percent(number)),
        Unit::Number | Unit::Text => human::number(number),
    };
    Cell::number(text, number)
}

/// Names longer than this lose their template arguments and parameters on a terminal.
const LONG_NAME: usize = 60;

/// A kernel's name without what makes it unreadable: `void`, parameters, template arguments.
pub(crate) fn short_name(name: &str) -> String {
    let of_code = name.starts_with("void ") || name.contains("::");
    let name = name.strip_prefix("void ").unwrap_or(name);
    if name.chars().count() <= LONG_NAME || !of_code {
        return name.to_owned();
    }
    // What the arguments name is often what tells two kernels apart: the innermost words of functors stay.
    let (mut out, mut depth, mut words) = (String::new(), 0_u32, String::new());
    for letter in name.chars() {
        match letter {
            '<' | '(' if depth == 0 && out.is_empty() => out.push(letter), // `(anonymous namespace)::f`
            '<' | '(' => {
                depth += 1;
                words.push(' ');
            }
            '>' | ')' if depth > 0 => {
                depth -= 1;
                words.push(' ');
            }
            _ if depth == 0 => out.push(letter),
            _ => words.push(letter),
        }
    }
    let telling = words
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .rev()
        .find(|w| ["unctor", "Op", "kernel", "Kernel"].iter().any(|mark| w.contains(mark)) && !out.contains(w));
    let out = out.replace("::::", "::");
    match telling {
        Some(word) => format!("{} <…{word}…>", out.trim()),
        None => out.trim().to_owned(),
    }
}

/// Reports as CSV. Those of Nsight Systems' summaries read as `nsys stats -f csv` writes them; the others carry plain
/// nanoseconds, bytes and fractions. Several tables are set apart by an empty line.
pub(crate) fn csv(reports: &[Report]) -> String {
    let mut parts = Vec::new();
    for report in reports {
        if nsys_stats::canonical_name(report.name).is_some() {
            parts.extend(report.not_applicable.is_none().then(|| nsys_stats::csv(report)));
        } else {
            parts.extend(report.sheets.iter().map(plain_csv));
        }
    }
    parts.join("\n")
}

/// A value in the unit that its column's name promises: some names are those of Nsight Systems.
fn as_named(value: &Value, column: &Column) -> Value {
    let scale = match column.named {
        Some(NamedUnit::Megabytes) => 1e-6,
        Some(NamedUnit::Percent) => 100.0,
        Some(NamedUnit::Nanoseconds) | None => return value.clone(),
    };
    match value {
        Value::Int(number) => Value::Float(*number as f64 * scale),
        Value::Float(number) => Value::Float(number * scale),
        other => other.clone(),
    }
}

fn unit_name(column: &Column) -> Json {
    match column.named {
        Some(NamedUnit::Megabytes) => json!("megabytes"),
        Some(NamedUnit::Percent) => json!("percent"),
        Some(NamedUnit::Nanoseconds) | None => json!(column.unit),
    }
}

/// A sheet as programs read it: the ends of an interval are two columns.
fn with_single_values(sheet: &Sheet) -> Sheet {
    let single = |unit: Unit| if unit == Unit::ShareInterval { Unit::ShareChange } else { Unit::NsChange };
    let columns = sheet.columns.iter().flat_map(|column| match column.unit.is_interval() {
        true => [" low", " high"].map(|end| Column::new(format!("{}{end}", column.name), single(column.unit))).to_vec(),
        false => vec![column.clone()],
    });
    let row = |row: &Vec<Value>| -> Vec<Value> {
        let values = row.iter().zip(&sheet.columns).flat_map(|(value, column)| match value {
            Value::Interval(low, high) => vec![(*low).into(), (*high).into()],
            value if column.unit.is_interval() => vec![value.clone(); 2],
            value => vec![value.clone()],
        });
        values.collect()
    };
    Sheet {
        columns: columns.collect(),
        rows: sheet.rows.iter().map(row).collect(),
        total: sheet.total.as_ref().map(row),
        ..sheet.clone()
    }
}

fn plain_csv(sheet: &Sheet) -> String {
    let sheet = &with_single_values(sheet);
    let quoted = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let header = sheet.columns.iter().map(|column| {
        let unit = match column.unit {
            _ if column.named.is_some() => "",
            Unit::Ns | Unit::NsChange | Unit::Moment => " (ns)",
            Unit::Bytes => " (bytes)",
            Unit::BytesPerS => " (bytes/s)",
            Unit::FlopsPerS => " (FLOP/s)",
            Unit::Share | Unit::ShareChange => " (fraction)",
            // Single values have other units.
            Unit::NsInterval | Unit::ShareInterval => "",
            Unit::Text | Unit::Count | Unit::Id | Unit::Number => "",
        };
        quoted(&format!("{}{unit}", column.name))
    });
    let mut out = header.collect::<Vec<_>>().join(",") + "\n";
    for row in &sheet.rows {
        let values = row.iter().zip(&sheet.columns).map(|(value, column)| match as_named(value, column) {
            Value::Unknown | Value::Interval(..) => String::new(),
            Value::Int(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Text(text) => quoted(&text),
        });
        out.push_str(&values.collect::<Vec<_>>().join(","));
        out.push('\n');
    }
    out
}

/// A report as JSON: rows are objects with the columns' names as keys; units stand beside.
pub(crate) fn json(report: &Report) -> Json {
    let sheets = report.sheets.iter().map(with_single_values).map(|sheet| {
        let object = |row: &Vec<Value>| -> Json {
            let pairs = sheet.columns.iter().zip(row);
            let pairs = pairs.map(|(column, value)| (column.name.clone(), json!(as_named(value, column))));
            Json::Object(pairs.collect::<Map<_, _>>())
        };
        json!({
            "name": sheet.name,
            "title": sheet.title,
            "units": sheet.columns.iter().map(|c| (c.name.clone(), unit_name(c))).collect::<Map<_, _>>(),
            "rows": sheet.rows.iter().map(object).collect::<Vec<_>>(),
            "total": sheet.total.as_ref().map(object),
        })
    });
    json!({
        "report": report.name,
        "title": report.title,
        "not_applicable": report.not_applicable,
        "tables": sheets.collect::<Vec<_>>(),
        "notes": report.notes,
    })
}

/// Breaks a sentence into lines of at most `width` columns, later lines indented.
pub(crate) fn wrap(text: &str, width: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    // A word that is wider than a line is broken where it has to be.
    let longest = width.saturating_sub(2).max(1);
    let letters: Vec<Vec<char>> = text.split_whitespace().map(|word| word.chars().collect()).collect();
    for word in letters.iter().flat_map(|word| word.chunks(longest)) {
        let length = word.len();
        if column > 0 && column + 1 + length > width {
            out.push_str("\n  ");
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.extend(word);
        column += length;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Sheet {
        let columns = [Column::new("Name", Unit::Text), Column::in_ns("Total Time"), Column::new("share", Unit::Share)];
        let mut sheet = Sheet::new("sample", columns);
        sheet.push(["a,b".into(), 1500_i64.into(), 0.5.into()]);
        sheet.push(["c".into(), Value::Unknown, 0.25.into()]);
        sheet
    }

    #[test]
    fn the_same_values_for_people_and_programs() {
        let text = table(&sample(), 0).render(80);
        assert!(text.contains("Total Time") && !text.contains("(ns)") && text.contains("1.50 µs"), "{text}");
        assert!(text.contains("n/a") && text.contains("50.0 %"), "{text}");
        assert_eq!(plain_csv(&sample()), "Name,Total Time (ns),share (fraction)\n\"a,b\",1500,0.5\nc,,0.25\n");
        let report = Report { sheets: vec![sample()], ..Report::new("x", "X") };
        let document = json(&report);
        assert_eq!(document["tables"][0]["rows"][0]["Total Time (ns)"], 1500);
        assert_eq!(document["tables"][0]["rows"][1]["Total Time (ns)"], Json::Null);
        let cut = super::text(&report, 80, 1);
        assert!(cut.contains("… 1 more row,"), "{cut}");
    }

    /// A table of the same form as a comparison's kernels.
    fn kernels(names: &[(&str, &str)]) -> Report {
        let columns = [
            ("Iterations", Unit::Text),
            ("Kernel A", Unit::Text),
            ("Kernel B", Unit::Text),
            ("Runs A", Unit::Number),
            ("Time A", Unit::Ns),
            ("Time B", Unit::Ns),
            ("Change", Unit::NsChange),
            ("95 % CI", Unit::NsInterval),
        ];
        let mut sheet = Sheet::new("kernels", columns.map(|(name, unit)| Column::new(name, unit)));
        for (place, (a, b)) in names.iter().enumerate() {
            sheet.push([
                format!("decode,{place}").into(),
                (*a).into(),
                (*b).into(),
                22.0.into(),
                1.25e6.into(),
                2.25e6.into(),
                1e6.into(),
                Value::Interval(0.9e6, 1.1e6),
            ]);
        }
        Report { sheets: vec![sheet], ..Report::new("x", "X") }
    }

    #[test]
    fn names_that_differ_in_an_argument_differ_at_every_width() {
        let tile = |tile: &str| {
            format!(
                "void cutlass::Kernel<cutlass::gemm::device::GemmUniversalAdapter<cutlass::bfloat16_t, cutlass::GemmShape<{tile}>, cutlass::epilogue::LinearCombination>>(Params)"
            )
        };
        let (a, b) = (tile("128, 128, 64"), tile("128, 256, 64"));
        for width in [60, 80, 100, 160, 250, 600] {
            let text = text(&kernels(&[(&a, &b)]), width, 0);
            let row =
                text.lines().find(|line| line.starts_with("decode") || line.contains("Kernel<") || line.contains('…'));
            let row = row.unwrap_or_else(|| panic!("{text}"));
            assert!(row.contains("256") || row.contains("25") && row.contains("12"), "{width}:\n{text}");
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}:\n{text}");
        }
        // Where functions differ, arguments take no room.
        let text = text(&kernels(&[(&a, &b.replace("cutlass::Kernel", "cutlass::Other"))]), 200, 0);
        assert!(text.contains("cutlass::Kernel  ") && text.contains("cutlass::Other  "), "{text}");
    }

    #[test]
    fn an_interval_keeps_both_ends() {
        let report = kernels(&[(&"a".repeat(50), &"b".repeat(50))]);
        for width in 40..140 {
            let text = super::text(&report, width, 0);
            let (shown, said) = (text.contains("+0.90 to +1.10 ms"), text.contains("95 % CI."));
            assert!(shown != said || text.contains("95 % CI,"), "{width}:\n{text}");
            // Names give way before an interval does.
            let names = text.matches("aaaaaaaaaaaaa").count() + text.matches("bbbbbbbbbbbbb").count();
            assert!(shown || names < 8, "{width}:\n{text}");
        }
        assert!(super::text(&report, 100, 0).contains("+0.90 to +1.10 ms"));
        let row = &json(&report)["tables"][0]["rows"][0];
        assert_eq!([&row["95 % CI low"], &row["95 % CI high"]], [900_000.0, 1_100_000.0]);
        let csv = csv(&[report]);
        assert!(csv.lines().next().unwrap().ends_with(",95 % CI low (ns),95 % CI high (ns)"), "{csv}");
        assert!(csv.lines().nth(1).unwrap().ends_with(",900000,1100000"), "{csv}");
    }

    #[test]
    fn numbers_of_both_sides_go_together() {
        let mut report = kernels(&[(&"a".repeat(50), &"b".repeat(50))]);
        report.sheets[0].columns[3] = Column::new("Launches A", Unit::Number).role(Role::Launches);
        report.sheets[0].columns.insert(4, Column::new("Launches B", Unit::Number));
        report.sheets[0].rows[0].insert(4, 23.0.into());
        for width in 40..180 {
            let (_, left_out) = fitted(&report.sheets[0], width, 0);
            let gone = |name: &str| left_out.iter().any(|header| header == name);
            assert_eq!(gone("Launches A"), gone("Launches B"), "{width}: {left_out:?}");
            assert_eq!(gone("Time A"), gone("Time B"), "{width}: {left_out:?}");
            assert!(!gone("95 % CI") || gone("Launches A"), "{width}: {left_out:?}");
        }
    }

    proptest! {
        #[test]
        fn names_that_differ_are_shown_different(
            head in "[a-z:<>,]{0,90}",
            parts in ("[a-z0-9]{0,9}", "[a-z0-9]{0,9}"),
            tail in "[a-z:<>,]{0,90}",
            width in 40..200_usize,
        ) {
            let (a, b) = (format!("void::{head}{}{tail}", parts.0), format!("void::{head}{}{tail}", parts.1));
            let report = kernels(&[(&a, &b)]);
            let (table, _) = fitted(&report.sheets[0], width, 0);
            let text = table.render(width);
            let row = text.lines().last().unwrap_or_default();
            let words: Vec<&str> = row.split_whitespace().collect();
            prop_assert_eq!(words[1] == words[2] || words[2..].starts_with(&["the", "same"]), a == b, "{}\n{}\n{}", a, b, text);
        }
    }

    #[test]
    fn long_names_keep_what_tells_them_apart() {
        let name = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float>>, std::array<char*, 3>>(int)";
        assert_eq!(short_name(name), "at::native::vectorized_elementwise_kernel <…MulFunctor…>");
        assert_eq!(short_name("void foo<int>(int)"), "foo<int>(int)");
        assert_eq!(short_name("nvjet_sm90_tst_128x64"), "nvjet_sm90_tst_128x64");
    }

    #[test]
    fn values_are_in_the_unit_of_their_name() {
        let columns =
            [Column::in_megabytes("Total"), Column::in_percent("Time (%)"), Column::new("share", Unit::Share)];
        let mut sheet = Sheet::new("s", columns);
        sheet.push([2_500_000_i64.into(), 0.25.into(), 0.25.into()]);
        let document = json(&Report { sheets: vec![sheet], ..Report::new("x", "X") });
        let row = &document["tables"][0]["rows"][0];
        assert_eq!([&row["Total (MB)"], &row["Time (%)"], &row["share"]], [2.5, 25.0, 0.25]);
        assert_eq!(document["tables"][0]["units"]["Time (%)"], "percent");
    }

    #[test]
    fn zeros_are_hidden_from_people_alone() {
        let columns = [Column::new("name", Unit::Text), Column::new("copies", Unit::Count).may_hide()];
        let mut sheet = Sheet::new("s", columns);
        sheet.push(["a".into(), 0_i64.into()]);
        let report = |sheet: &Sheet| Report { sheets: vec![sheet.clone()], ..Report::new("x", "X") };
        assert!(!super::text(&report(&sheet), 80, 0).contains("copies"));
        assert_eq!(without_zeros(&sheet).columns.len(), 1);
        assert_eq!(json(&report(&sheet))["tables"][0]["rows"][0]["copies"], 0);
        assert_eq!(plain_csv(&sheet), "name,copies\na,0\n");
        sheet.push(["b".into(), 2_i64.into()]);
        assert!(super::text(&report(&sheet), 80, 0).contains("copies"));
    }

    #[test]
    fn sentences_are_wrapped() {
        assert_eq!(wrap("one two three", 8), "one two\n  three\n");
        assert_eq!(wrap("a abcdefghij", 8), "a abcdef\n  ghij\n");
    }
}
