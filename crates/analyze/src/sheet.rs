//! What every report returns: tables of plain values, with the words a reader needs beside them.
//!
//! A [`Report`] knows what its numbers are (time, bytes, share, ...), not how they are printed: terminals, CSV, JSON and
//! pages each render the same values.

use serde::Serialize;

/// The answer to one question about a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Its name on the command line, e.g. `kern-sum`.
    pub name: &'static str,
    /// What it shows, for people.
    pub title: String,
    /// The tables, the main one first.
    pub sheets: Vec<Sheet>,
    /// Sentences to read with the tables: coverage, denominators, what was left out.
    pub notes: Vec<String>,
    /// Why the report has nothing to show; then there are no sheets.
    pub not_applicable: Option<String>,
}

impl Report {
    /// A report with tables.
    pub fn new(name: &'static str, title: impl Into<String>) -> Self {
        Self { name, title: title.into(), ..Self::default() }
    }

    /// A report that does not apply, and why.
    pub fn absent(name: &'static str, title: impl Into<String>, why: impl Into<String>) -> Self {
        Self { not_applicable: Some(why.into()), ..Self::new(name, title) }
    }

    /// Adds a table.
    pub fn sheet(mut self, sheet: Sheet) -> Self {
        self.sheets.push(sheet);
        self
    }

    /// Adds a sentence.
    pub fn note(mut self, text: impl Into<String>) -> Self {
        self.notes.push(text.into());
        self
    }
}

/// One table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sheet {
    /// Its name for machines, e.g. `kernels`.
    pub name: String,
    /// Its title for people; empty when the report's says it all.
    pub title: String,
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows, each as long as `columns`.
    pub rows: Vec<Vec<Value>>,
    /// A last row that sums up, where one makes sense.
    pub total: Option<Vec<Value>>,
}

impl Sheet {
    /// An empty table.
    pub fn new(name: impl Into<String>, columns: impl IntoIterator<Item = Column>) -> Self {
        Self { name: name.into(), columns: columns.into_iter().collect(), ..Self::default() }
    }

    /// Gives it a title.
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = title.into();
        self
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl IntoIterator<Item = Value>) {
        let row: Vec<Value> = row.into_iter().collect();
        debug_assert_eq!(row.len(), self.columns.len(), "sheet {}", self.name);
        self.rows.push(row);
    }
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// Its header, e.g. `Total Time (ns)` in CSV; terminals show it as it is.
    pub name: String,
    /// What its values are.
    pub unit: Unit,
    /// The unit that its name says, in which programs get the values.
    #[serde(skip)]
    pub named: Option<NamedUnit>,
    /// What it is for, where a table has no room for all columns.
    #[serde(skip)]
    pub role: Role,
    /// Whether people are spared it where all its values are zero. Programs always get it.
    #[serde(skip)]
    pub may_hide: bool,
}

impl Column {
    /// A column.
    pub fn new(name: impl Into<String>, unit: Unit) -> Self {
        Self { name: name.into(), unit, named: None, role: Role::Main, may_hide: false }
    }

    /// A time whose name says nanoseconds, as Nsight Systems' summaries do.
    pub fn in_ns(name: &str) -> Self {
        Self { named: Some(NamedUnit::Nanoseconds), ..Self::new(format!("{name}{NANOSECONDS}"), Unit::Ns) }
    }

    /// A size whose name says megabytes, as Nsight Systems' summaries do.
    pub fn in_megabytes(name: &str) -> Self {
        Self { named: Some(NamedUnit::Megabytes), ..Self::new(format!("{name}{MEGABYTES}"), Unit::Bytes) }
    }

    /// A share whose name says per cent, and of what where that is needed.
    pub fn in_percent(name: &str) -> Self {
        Self { named: Some(NamedUnit::Percent), ..Self::new(name, Unit::Share) }
    }

    /// Says what it is for.
    #[must_use]
    pub fn role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// Its header for people, whose values carry their units.
    #[must_use]
    pub fn header(&self) -> &str {
        let unit = match self.named {
            Some(NamedUnit::Nanoseconds) => NANOSECONDS,
            Some(NamedUnit::Megabytes) => MEGABYTES,
            Some(NamedUnit::Percent) | None => "",
        };
        self.name.strip_suffix(unit).unwrap_or(&self.name)
    }

    /// Spares people the column where all its values are zero.
    #[must_use]
    pub fn may_hide(self) -> Self {
        Self { may_hide: true, ..self }
    }
}

const NANOSECONDS: &str = " (ns)";
const MEGABYTES: &str = " (MB)";

/// A unit in the name of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedUnit {
    /// Nanoseconds.
    Nanoseconds,
    /// Millions of bytes.
    Megabytes,
    /// Per cent.
    Percent,
}

/// What a column is for. Which gives way first is up to whoever draws the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// What the table is about.
    #[default]
    Main,
    /// Standard deviation.
    Deviation,
    /// The smallest value.
    Lowest,
    /// The 25th percentile.
    LowerQuartile,
    /// The 75th percentile.
    UpperQuartile,
    /// The 90th percentile.
    MostBelow,
    /// The largest value.
    Highest,
    /// The mean, beside a median or a total.
    Mean,
    /// The process, beside what runs in it.
    Process,
    /// When it began, beside how long it took.
    Start,
    /// When it ended.
    End,
    /// How something was found, or by whom.
    How,
    /// How a range was made.
    Style,
    /// Launches, beside kernels.
    Launches,
    /// Kernels, beside times.
    Kernels,
}

/// The spread of times or sizes as Nsight Systems gives it.
pub(crate) const SPREAD: [(&str, Role); 5] = [
    ("Avg", Role::Mean),
    ("Med", Role::Main),
    ("Min", Role::Lowest),
    ("Max", Role::Highest),
    ("StdDev", Role::Deviation),
];

impl Unit {
    /// Whether values have two ends.
    #[must_use]
    pub fn is_interval(self) -> bool {
        matches!(self, Unit::NsInterval | Unit::ShareInterval)
    }
}

/// What the values of a column are. Times are stored in nanoseconds, sizes in bytes, shares as fractions of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Words.
    Text,
    /// A whole number of things.
    Count,
    /// A number that names something: an iteration, a process, a device.
    Id,
    /// A plain number without unit.
    Number,
    /// Nanoseconds.
    Ns,
    /// A moment on the trace's clock in nanoseconds: people are shown how long after the start of the trace it is.
    Moment,
    /// Nanoseconds, a difference: shown with its sign.
    NsChange,
    /// Two ends of a difference in nanoseconds, shown together with their signs.
    NsInterval,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerS,
    /// Floating-point operations per second.
    FlopsPerS,
    /// A fraction of 1, shown in per cent.
    Share,
    /// A fraction of 1, a difference: shown in per cent with its sign.
    ShareChange,
    /// Two ends of a difference as fractions of 1, shown together in per cent with their signs.
    ShareInterval,
}

/// A value of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// Not known, or not applicable.
    Unknown,
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// The low and the high end of an interval: one column for people, two fields in CSV and JSON.
    Interval(f64, f64),
    /// Words.
    Text(String),
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Value::Int(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Value::Int(value as i64)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        i64::try_from(value).map_or(Value::Float(value as f64), Value::Int)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Value::Int(i64::from(value))
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        if value.is_finite() { Value::Float(value) } else { Value::Unknown }
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Value::Text(value)
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Value::Unknown, Into::into)
    }
}
