//! Reports as text: tables for people, CSV and JSON for programs.

use serde_json::{Map, Value as Json, json};
use strobe_analyze::nsys_stats;
use strobe_analyze::sheet::{Report, Sheet, Unit, Value};
use strobe_report::human;
use strobe_report::table::{Cell, Table};

/// What separates a report from the one before it on a terminal.
const RULE: &str = "═";

/// A report for the terminal: at most `top` rows of each table, 0 for all.
pub fn text(report: &Report, width: usize, top: usize) -> String {
    let mut out = format!("{}\n{}\n", report.title, RULE.repeat(report.title.chars().count().min(width)));
    if let Some(why) = &report.not_applicable {
        out.push_str(&wrap(&format!("Not applicable: {why}"), width));
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
        out.push_str(&fitted(sheet, width, top).render(width));
        if top > 0 && sheet.rows.len() > top {
            out.push_str(&format!(
                "… {} more rows, --top 0 shows all\n",
                human::count((sheet.rows.len() - top) as u64)
            ));
        }
    }
    for note in &report.notes {
        out.push_str(&wrap(note, width));
    }
    out
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

/// Columns that give way when names would be cut too short to tell them apart, the first to go first.
const LEAST_NEEDED: [&str; 4] = ["StdDev (ns)", "Min (ns)", "Max (ns)", "Avg (ns)"];
/// A name cut shorter than this tells little.
const READABLE: usize = 44;

/// The table of a sheet with as many columns as leave room for names.
fn fitted(sheet: &Sheet, width: usize, top: usize) -> Table {
    let mut sheet = sheet.clone();
    for name in LEAST_NEEDED {
        let names = sheet.rows.iter().filter_map(|row| match row.last() {
            Some(Value::Text(text)) => Some(short_name(text).chars().count()),
            _ => None,
        });
        let wanted = names.max().unwrap_or(0).min(READABLE);
        let others: usize = table(&sheet, top).widths_without_last();
        let Some(place) = sheet.columns.iter().position(|column| column.name == name) else { continue };
        if wanted == 0 || others + wanted <= width {
            break;
        }
        sheet.columns.remove(place);
        sheet.rows.iter_mut().for_each(|row| drop(row.remove(place)));
    }
    table(&sheet, top)
}

/// A sheet as a table: numbers with units that fit, names shortened as far as they stay recognisable.
pub fn table(sheet: &Sheet, top: usize) -> Table {
    table_of(sheet, top, true)
}

/// A sheet as a table with all its rows and full names, for a page.
pub fn page_table(sheet: &Sheet) -> Table {
    table_of(sheet, 0, false)
}

fn table_of(sheet: &Sheet, top: usize, short_names: bool) -> Table {
    let header = |name: &str| name.strip_suffix(" (ns)").or(name.strip_suffix(" (MB)")).unwrap_or(name).to_owned();
    let mut table = Table::new(sheet.columns.iter().map(|column| match column.unit {
        Unit::Ns | Unit::NsChange | Unit::Bytes => header(&column.name),
        _ => column.name.clone(),
    }));
    if !sheet.title.is_empty() {
        table = table.title(&sheet.title);
    }
    let shown = if top == 0 { sheet.rows.len() } else { top };
    let longest = |column: usize| {
        let texts = sheet.rows.iter().take(shown).map(|row| match row.get(column) {
            Some(Value::Text(text)) => text.chars().count(),
            _ => 0,
        });
        texts.max().unwrap_or(0)
    };
    for (index, column) in sheet.columns.iter().enumerate() {
        table = if column.unit == Unit::Text { table.left(index) } else { table.right(index) };
    }
    if let Some(widest) = (0..sheet.columns.len()).max_by_key(|&column| longest(column)) {
        table = table.flexible(widest);
    }
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

/// A value as people read it; cells carry their numbers, so that pages sort by value and not by text.
pub fn cell(value: &Value, unit: Unit) -> Cell {
    let number = match value {
        Value::Unknown if unit == Unit::Text => return Cell::from(""),
        Value::Unknown => return Cell::from(human::NOT_KNOWN),
        Value::Text(text) => return Cell::from(text.as_str()),
        Value::Int(number) => *number as f64,
        Value::Float(number) => *number,
    };
    let signed = |text: String| if number > 0.0 { format!("+{text}") } else { text };
    let text = match unit {
        Unit::Count => match value {
            Value::Int(number) if *number >= 0 => human::count(*number as u64),
            Value::Int(number) => format!("-{}", human::count(number.unsigned_abs())),
            _ => human::number(number),
        },
        Unit::Ns => human::ns(number),
        Unit::NsChange => signed(human::ns(number)),
        Unit::Bytes if number < 0.0 => format!("-{}", human::bytes(number.abs() as u64)),
        Unit::Bytes => human::bytes(number as u64),
        Unit::BytesPerS => human::bytes_per_s(number),
        Unit::FlopsPerS => human::flops_per_s(number),
        Unit::Share => human::percent(number),
        Unit::ShareChange => signed(human::percent(number)),
        Unit::Number | Unit::Text => human::number(number),
    };
    Cell::number(text, number)
}

/// Names longer than this lose their template arguments and parameters on a terminal.
const LONG_NAME: usize = 60;

/// A kernel's name without what makes it unreadable: `void`, parameters, template arguments.
pub fn short_name(name: &str) -> String {
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
pub fn csv(reports: &[Report]) -> String {
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

fn plain_csv(sheet: &Sheet) -> String {
    let quoted = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let header = sheet.columns.iter().map(|column| {
        let unit = match column.unit {
            _ if column.name.contains('(') => "",
            Unit::Ns | Unit::NsChange => " (ns)",
            Unit::Bytes => " (bytes)",
            Unit::BytesPerS => " (bytes/s)",
            Unit::FlopsPerS => " (FLOP/s)",
            Unit::Share | Unit::ShareChange => " (fraction)",
            Unit::Text | Unit::Count | Unit::Number => "",
        };
        quoted(&format!("{}{unit}", column.name))
    });
    let mut out = header.collect::<Vec<_>>().join(",") + "\n";
    for row in &sheet.rows {
        let values = row.iter().map(|value| match value {
            Value::Unknown => String::new(),
            Value::Int(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Text(text) => quoted(text),
        });
        out.push_str(&values.collect::<Vec<_>>().join(","));
        out.push('\n');
    }
    out
}

/// A report as JSON: rows are objects with the columns' names as keys; units stand beside.
pub fn json(report: &Report) -> Json {
    let sheets = report.sheets.iter().map(|sheet| {
        let object = |row: &Vec<Value>| -> Json {
            let pairs = sheet.columns.iter().zip(row).map(|(column, value)| (column.name.clone(), json!(value)));
            Json::Object(pairs.collect::<Map<_, _>>())
        };
        json!({
            "name": sheet.name,
            "title": sheet.title,
            "units": sheet.columns.iter().map(|c| (c.name.clone(), json!(c.unit))).collect::<Map<_, _>>(),
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
pub fn wrap(text: &str, width: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            out.push_str("\n  ");
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use strobe_analyze::sheet::Column;

    fn sample() -> Sheet {
        let columns = [("Name", Unit::Text), ("Total Time (ns)", Unit::Ns), ("share", Unit::Share)];
        let mut sheet = Sheet::new("sample", columns.map(|(name, unit)| Column::new(name, unit)));
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
        assert!(cut.contains("… 1 more rows"), "{cut}");
    }

    #[test]
    fn long_names_keep_what_tells_them_apart() {
        let name = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float>>, std::array<char*, 3>>(int)";
        assert_eq!(short_name(name), "at::native::vectorized_elementwise_kernel <…MulFunctor…>");
        assert_eq!(short_name("void foo<int>(int)"), "foo<int>(int)");
        assert_eq!(short_name("nvjet_sm90_tst_128x64"), "nvjet_sm90_tst_128x64");
    }

    #[test]
    fn sentences_are_wrapped() {
        assert_eq!(wrap("one two three", 8), "one two\n  three\n");
    }
}
