//! The text that `nsys stats -f csv` prints.

use crate::sheet::{Report, Sheet, Unit, Value};

/// The main table of a summary as `nsys stats -f csv` writes it: header, quoting, decimals and line ends. Empty when the
/// report has nothing to show.
pub fn csv(report: &Report) -> String {
    let Some(sheet) = report.sheets.first() else { return String::new() };
    let mut text = String::new();
    line(&mut text, sheet.columns.iter().map(|c| c.name.clone()));
    let listed = listed_time(sheet);
    for row in &sheet.rows {
        let share = |total: &Value| match total {
            Value::Int(total) if listed > 0.0 => 100.0 * *total as f64 / listed,
            _ => 0.0,
        };
        let cells = sheet.columns.iter().zip(row).map(|(column, value)| match (column.unit, value) {
            // From the totals again: a fraction times 100 may miss a tie by its last bit.
            (Unit::Share, _) => rounded(row.get(1).map_or(0.0, share), 1),
            (Unit::Bytes, Value::Int(bytes)) => rounded(*bytes as f64 / 1e6, 3),
            (Unit::Bytes, Value::Float(bytes)) => rounded(bytes / 1e6, 3),
            (_, Value::Float(number)) => rounded(*number, 1),
            (_, Value::Int(number)) => number.to_string(),
            (_, Value::Text(words)) => words.clone(),
            // Nsight Systems has no intervals.
            (_, Value::Unknown | Value::Interval(..)) => String::new(),
        });
        line(&mut text, cells);
    }
    text
}

/// The sum of the totals, which stand in the second column of every table with a share.
fn listed_time(sheet: &Sheet) -> f64 {
    let totals = sheet.rows.iter().filter_map(|row| match row.get(1) {
        Some(Value::Int(total)) => Some(i128::from(*total)),
        _ => None,
    });
    totals.sum::<i128>() as f64
}

fn line(text: &mut String, cells: impl Iterator<Item = String>) {
    for (index, cell) in cells.enumerate() {
        if index > 0 {
            text.push(',');
        }
        // nsys quotes what holds a comma and leaves quotes inside as they are, which is not what CSV readers expect,
        // but what scripts made for its output know.
        if cell.contains(',') {
            text.push('"');
            text.push_str(&cell);
            text.push('"');
        } else {
            text.push_str(&cell);
        }
    }
    text.push('\n');
}

/// `value` with so many decimals, halves away from zero as nsys rounds them (formatting alone rounds halves to even).
fn rounded(value: f64, decimals: usize) -> String {
    // A half is a tie only where binary can hold it: after multiplication by a power of two an odd whole number.
    let doubled = value * f64::powi(2.0, decimals as i32 + 1);
    let tie = doubled.fract() == 0.0 && doubled % 2.0 != 0.0;
    let nudge = if tie { value.abs().max(1.0) * f64::EPSILON * 2.0 * value.signum() } else { 0.0 };
    format!("{:.decimals$}", value + nudge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_go_away_from_zero() {
        let one = |v| rounded(v, 1);
        assert_eq!([one(5780.25), one(1239.25), one(3692.75), one(-0.25)], ["5780.3", "1239.3", "3692.8", "-0.3"]);
        assert_eq!([one(0.05), one(0.5), one(1.0), one(0.249)], ["0.1", "0.5", "1.0", "0.2"]);
        assert_eq!([rounded(0.0625, 3), rounded(0.1875, 3), rounded(0.0005, 3)], ["0.063", "0.188", "0.001"]);
        assert_eq!(one(8e15 + 0.25 - 0.25), "8000000000000000.0");
    }

    #[test]
    fn only_commas_are_quoted() {
        let mut text = String::new();
        line(&mut text, ["a,b", "say \"x\"", " plain ", "two\nlines", ""].into_iter().map(str::to_owned));
        assert_eq!(text, "\"a,b\",say \"x\", plain ,two\nlines,\n");
    }
}
