//! Tables: the same rows for the terminal and for a page.

/// One cell: what is shown, and the number to sort by if it is one.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub(crate) text: String,
    pub(crate) sort: Option<f64>,
}

impl Cell {
    /// A number, shown as `text` and sorted by `value`.
    pub fn number(text: impl Into<String>, value: f64) -> Self {
        Self { text: text.into(), sort: Some(value) }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::from(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, sort: None }
    }
}

/// On which side a column's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// For names.
    Left,
    /// For numbers.
    Right,
}

/// A table with a header. The first column is left-aligned and the others right-aligned unless told otherwise;
/// the first column gives way when the table is too wide.
#[derive(Clone, Debug)]
pub struct Table {
    pub(crate) title: Option<String>,
    pub(crate) headers: Vec<String>,
    pub(crate) align: Vec<Align>,
    pub(crate) rows: Vec<Row>,
    flexible: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) cells: Vec<Cell>,
    /// A sum below the others: set off by a line, and not sorted among them.
    pub(crate) total: bool,
}

const GAP: usize = 2;
const NARROWEST: usize = 6;

impl Table {
    /// A table with these columns and no rows.
    pub fn new<H: Into<String>>(headers: impl IntoIterator<Item = H>) -> Self {
        let headers: Vec<String> = headers.into_iter().map(Into::into).collect();
        let mut align = vec![Align::Right; headers.len()];
        if let Some(first) = align.first_mut() {
            *first = Align::Left;
        }
        Self { title: None, headers, align, rows: Vec::new(), flexible: 0 }
    }

    /// Sets a line above the table.
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// Left-aligns a column, counted from 0. One that does not exist is ignored.
    pub fn left(mut self, column: usize) -> Self {
        if let Some(align) = self.align.get_mut(column) {
            *align = Align::Left;
        }
        self
    }

    /// Right-aligns a column, counted from 0. One that does not exist is ignored.
    pub fn right(mut self, column: usize) -> Self {
        if let Some(align) = self.align.get_mut(column) {
            *align = Align::Right;
        }
        self
    }

    /// The width of all columns but the last, with the gaps between all.
    pub fn widths_without_last(&self) -> usize {
        let widths = self.widths(usize::MAX);
        let others = widths.len().saturating_sub(1);
        widths.iter().take(others).sum::<usize>() + GAP * others
    }

    /// Lets another column than the first give way when the table is too wide.
    pub fn flexible(mut self, column: usize) -> Self {
        self.flexible = column;
        self
    }

    /// Adds a row. Missing cells are empty, surplus ones are dropped.
    pub fn row<C: Into<Cell>>(mut self, cells: impl IntoIterator<Item = C>) -> Self {
        self.push(cells);
        self
    }

    /// Adds a row in place, for loops.
    pub fn push<C: Into<Cell>>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.add(cells.into_iter().map(Into::into).collect(), false);
    }

    /// Adds a sum: set off by a line, and never sorted among the rows above.
    pub fn total<C: Into<Cell>>(mut self, cells: impl IntoIterator<Item = C>) -> Self {
        self.add(cells.into_iter().map(Into::into).collect(), true);
        self
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn add(&mut self, mut cells: Vec<Cell>, total: bool) {
        cells.resize(self.headers.len(), Cell::from(""));
        self.rows.push(Row { cells, total });
    }

    /// The table as lines of text, at most `width` columns wide as far as the flexible column allows.
    pub fn render(&self, width: usize) -> String {
        let widths = self.widths(width);
        let full: usize = widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1);
        let rule = "─".repeat(full);
        let mut out = String::new();
        let mut line = |text: &str| {
            out.push_str(text.trim_end());
            out.push('\n');
        };
        if let Some(title) = &self.title {
            line(&one_line(title));
        }
        line(&self.line(self.headers.iter().map(String::as_str), &widths));
        line(&rule);
        let mut above_total = true;
        for row in &self.rows {
            if row.total && above_total {
                line(&rule);
            }
            above_total = !row.total;
            line(&self.line(row.cells.iter().map(|c| c.text.as_str()), &widths));
        }
        out
    }

    fn widths(&self, limit: usize) -> Vec<usize> {
        let mut widths: Vec<usize> = self.headers.iter().map(|h| length(h)).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(&row.cells) {
                *width = (*width).max(length(&cell.text));
            }
        }
        let full: usize = widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1);
        if let Some(flexible) = widths.get_mut(self.flexible) {
            let surplus = full.saturating_sub(limit);
            let least = NARROWEST.min(*flexible);
            *flexible = flexible.saturating_sub(surplus).max(least);
        }
        widths
    }

    fn line<'a>(&self, cells: impl Iterator<Item = &'a str>, widths: &[usize]) -> String {
        let cells: Vec<String> = cells
            .zip(widths)
            .zip(&self.align)
            .map(|((text, &width), align)| {
                let text = shorten(&one_line(text), width);
                match align {
                    Align::Left => format!("{text:<width$}"),
                    Align::Right => format!("{text:>width$}"),
                }
            })
            .collect();
        cells.join(&" ".repeat(GAP))
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Control characters would break the layout or reach the terminal as commands.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Cuts text that is too long, with an ellipsis in place of what is missing.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    if length(text) <= width {
        return text.to_owned();
    }
    let kept = text.chars().take(width.saturating_sub(1));
    kept.chain(std::iter::once('…')).take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        Table::new(["op", "kernel", "calls", "share"])
            .left(1)
            .row(["gate_up_proj", "gemm_packed", "1,234", "61.0 %"])
            .row(["norm", "rms", "7", "2.5 %"])
            .total(["all", "", "1,241", "63.5 %"])
    }

    #[test]
    fn numbers_are_right_aligned() {
        assert_eq!(
            sample().title("Ops").render(200),
            "\
Ops
op            kernel       calls   share
────────────────────────────────────────
gate_up_proj  gemm_packed  1,234  61.0 %
norm          rms              7   2.5 %
────────────────────────────────────────
all                        1,241  63.5 %
"
        );
    }

    #[test]
    fn the_name_column_gives_way() {
        let text = sample().render(36);
        assert!(text.contains("gate_up…  gemm_packed"), "{text}");
        assert!(text.lines().all(|l| l.chars().count() <= 36), "{text}");
        let text = sample().flexible(1).render(36);
        assert!(text.contains("gate_up_proj  gemm_p…"), "{text}");
        // There is a limit to shrinking: the rest stays readable.
        assert!(sample().render(1).contains("gate_…"));
    }

    #[test]
    fn odd_rows_do_not_break_it() {
        let text = Table::new(["a", "b"]).row(["1"]).row(["1", "2", "3"]).row(["x\ny\u{1b}[2J", ""]).render(80);
        assert_eq!(text.lines().count(), 5);
        assert!(!text.contains('\u{1b}') && !text.contains('3'));
        assert_eq!(Table::new(Vec::<String>::new()).render(10), "\n\n");
    }
}
