//! Tables: the same rows for the terminal and for a page.

use crate::terminal::is_unfit;

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

/// A table with a header. The first column is left-aligned and the others right-aligned unless told otherwise. When the
/// table is too wide, headers of several words take several lines, then the first column gives way.
#[derive(Clone, Debug)]
pub struct Table {
    pub(crate) title: Option<String>,
    pub(crate) headers: Vec<String>,
    pub(crate) align: Vec<Align>,
    pub(crate) rows: Vec<Row>,
    flexible: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) cells: Vec<Cell>,
    /// A sum below the others: set off by a line, and not sorted among them.
    pub(crate) total: bool,
}

/// Columns between columns; where that is too much, one.
const GAP: usize = 2;
/// Most lines that a header is broken into.
const HEADER_LINES: usize = 4;
/// Text cut shorter than the first is hard to read, than the second impossible.
const NARROW: usize = 12;
const NARROWEST: usize = 6;

impl Table {
    /// A table with these columns and no rows.
    pub fn new<H: Into<String>>(headers: impl IntoIterator<Item = H>) -> Self {
        let headers: Vec<String> = headers.into_iter().map(Into::into).collect();
        let mut align = vec![Align::Right; headers.len()];
        if let Some(first) = align.first_mut() {
            *first = Align::Left;
        }
        Self { title: None, headers, align, rows: Vec::new(), flexible: vec![0] }
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

    /// Whether it fits this width without cutting the text of flexible columns to less than `readable` columns.
    pub fn fits(&self, width: usize, readable: usize) -> bool {
        let mut widths = self.natural_widths(HEADER_LINES);
        for &column in &self.flexible {
            if let Some(width) = widths.get_mut(column) {
                *width = (*width).min(readable);
            }
        }
        full_width(&widths, GAP) <= width
    }

    /// How wide each column's text is at this width of the whole; cells that are wider are cut.
    #[must_use]
    pub fn column_widths(&self, width: usize) -> Vec<usize> {
        self.layout(width).0
    }

    /// Lets another column than the first give way when the table is too wide.
    pub fn flexible(self, column: usize) -> Self {
        self.flexible_columns([column])
    }

    /// Lets these columns give way when the table is too wide, the widest of them first.
    pub fn flexible_columns(mut self, columns: impl IntoIterator<Item = usize>) -> Self {
        self.flexible = columns.into_iter().collect();
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
        let (widths, gap) = self.layout(width);
        let rule = "─".repeat(full_width(&widths, gap));
        let mut out = String::new();
        let mut line = |text: &str| {
            out.push_str(text.trim_end());
            out.push('\n');
        };
        if let Some(title) = &self.title {
            line(&one_line(title));
        }
        for header in self.header_lines(&widths) {
            line(&self.line(header.iter().map(String::as_str), &widths, gap));
        }
        line(&rule);
        let mut above_total = true;
        for row in &self.rows {
            if row.total && above_total {
                line(&rule);
            }
            above_total = !row.total;
            line(&self.line(row.cells.iter().map(|c| c.text.as_str()), &widths, gap));
        }
        out
    }

    /// Widths at which nothing is cut, headers on at most so many lines.
    fn natural_widths(&self, lines: usize) -> Vec<usize> {
        let cells = |column: usize| self.rows.iter().filter_map(move |row| Some(length(&row.cells.get(column)?.text)));
        let headers = self.headers.iter().enumerate();
        headers.map(|(column, text)| cells(column).max().unwrap_or(0).max(broken_width(text, lines))).collect()
    }

    /// Widths of the columns and the gap between them. Headers break first, then text is cut, then gaps close.
    fn layout(&self, limit: usize) -> (Vec<usize>, usize) {
        let mut widths = self.natural_widths(1);
        for lines in 2..=HEADER_LINES {
            if full_width(&widths, GAP) > limit {
                widths = self.natural_widths(lines);
            }
        }
        for (gap, narrowest) in [(GAP, NARROW), (1, NARROWEST)] {
            // The widest gives way until it is as narrow as the next: what all can spare is taken from none alone.
            while full_width(&widths, gap) > limit {
                let widest = self.flexible.iter().filter_map(|&column| Some((*widths.get(column)?, column))).max();
                let Some((width, column)) = widest.filter(|(width, _)| *width > narrowest) else { break };
                widths[column] = width - 1;
            }
            if full_width(&widths, gap) <= limit {
                return (widths, gap);
            }
        }
        (widths, 1)
    }

    /// The headers, on as many lines as they need to fit their columns. The last line is the fullest.
    fn header_lines(&self, widths: &[usize]) -> Vec<Vec<String>> {
        let wrapped: Vec<Vec<String>> =
            self.headers.iter().zip(widths).map(|(text, &width)| wrap(text, width)).collect();
        let height = wrapped.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let line = |at: usize| {
            let word = |lines: &Vec<String>| (at + lines.len()).checked_sub(height).and_then(|i| lines.get(i).cloned());
            wrapped.iter().map(|lines| word(lines).unwrap_or_default()).collect()
        };
        (0..height).map(line).collect()
    }

    fn line<'a>(&self, cells: impl Iterator<Item = &'a str>, widths: &[usize], gap: usize) -> String {
        let cells: Vec<String> = cells
            .zip(widths)
            .zip(&self.align)
            .map(|((text, &width), align)| {
                let text = cut(&one_line(text), width);
                match align {
                    Align::Left => format!("{text:<width$}"),
                    Align::Right => format!("{text:>width$}"),
                }
            })
            .collect();
        cells.join(&" ".repeat(gap))
    }
}

/// Breaks a text between words where it is wider than `width`.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    if length(text) <= width {
        return vec![text.to_owned()];
    }
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if length(line) + 1 + length(word) <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The least width at which a text takes at most so many lines.
fn broken_width(text: &str, lines: usize) -> usize {
    let longest_word = text.split_whitespace().map(length).max().unwrap_or(0);
    (longest_word..length(text)).find(|&width| wrap(text, width).len() <= lines).unwrap_or(length(text))
}

fn full_width(widths: &[usize], gap: usize) -> usize {
    widths.iter().sum::<usize>() + gap * widths.len().saturating_sub(1)
}

/// Cuts a name that is too long. What tells long names apart often stands at their end: it stays.
fn cut(text: &str, width: usize) -> String {
    if length(text) <= width || width < NARROW {
        return shorten(text, width);
    }
    let tail = width / 3;
    let end: String = text.chars().skip(length(text) - tail).collect();
    shorten(text, width - tail) + &end
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Control characters would break the layout or reach the terminal as commands. Widths are known by now: a letter stays one.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if is_unfit(c) { ' ' } else { c }).collect()
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
        assert!(
            text.contains("gate_up_pr… gemm_packed 1,234") && text.lines().all(|l| l.chars().count() <= 36),
            "{text}"
        );
        let table = Table::new(["op", "n"]).row(["the_first_of_two_names", "1"]).row(["the_first_of_two_others", "2"]);
        let text = table.render(17);
        assert!(text.contains("the_first…ames") && text.contains("the_first…hers"), "{text}");
        let text = table.clone().flexible(1).render(17);
        assert!(text.contains("the_first_of_two_others"), "only the flexible column is cut: {text}");
        // There is a limit to shrinking: the rest stays readable.
        assert!(table.render(1).contains("the_f…"));
    }

    #[test]
    fn several_columns_give_way_fairly() {
        let long = "abcdefghijklmnopqrstuvwxyz";
        let table = Table::new(["name", "n", "name"]).left(2).flexible_columns([0, 2]).row([long, "7", &long[..14]]);
        let row = |width: usize| table.render(width).lines().nth(2).unwrap().to_owned();
        assert_eq!(row(36), "abcdefghijk…vwxyz  7  abcdefghijklmn");
        assert_eq!(row(29), "abcdefg…wxyz  7  abcdefg…klmn");
        assert_eq!(row(21), "abcdefgh… 7 abcdefgh…", "then gaps close");
        assert_eq!(row(10), "abcde… 7 abcde…");
    }

    #[test]
    fn headers_take_several_lines_before_names_are_cut() {
        let table = Table::new(["kernel", "runs per iteration", "total time"]).row(["gemm_packed", "3", "1.5 ms"]);
        assert_eq!(table.render(80).lines().next(), Some("kernel       runs per iteration  total time"));
        let narrow = [
            "              runs per   total",
            "kernel       iteration    time",
            "──────────────────────────────",
            "gemm_packed          3  1.5 ms",
        ];
        assert_eq!(table.render(30).lines().collect::<Vec<_>>(), narrow);
    }

    #[test]
    fn odd_rows_do_not_break_it() {
        let text = Table::new(["a", "b"]).row(["1"]).row(["1", "2", "3"]).row(["x\ny\u{1b}[2J", ""]).render(80);
        assert_eq!(text.lines().count(), 5);
        assert!(!text.contains('\u{1b}') && !text.contains('3'));
        assert_eq!(Table::new(Vec::<String>::new()).render(10), "\n\n");
    }
}
