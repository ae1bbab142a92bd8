//! Calendar text for a point in time, without a calendar library.

/// A point in time by the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Civil {
    /// Gregorian year.
    pub year: i64,
    /// 1 to 12.
    pub month: i64,
    /// 1 to 31.
    pub day: i64,
    /// 0 to 23.
    pub hour: i64,
    /// 0 to 59.
    pub minute: i64,
    /// 0 to 59.
    pub second: i64,
}

impl Civil {
    /// The second that holds this nanosecond, counted from 1970-01-01.
    pub fn of(epoch_ns: i64) -> Civil {
        let seconds = epoch_ns.div_euclid(1_000_000_000);
        let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        let (year, month, day) = civil_from_days(days);
        Civil { year, month, day, hour: of_day / 3600, minute: of_day / 60 % 60, second: of_day % 60 }
    }
}

/// `YYYY-MM-DDTHH:MM:SS` (UTC) for nanoseconds since 1970-01-01.
pub(crate) fn to_text(epoch_ns: i64) -> String {
    let Civil { year, month, day, hour, minute, second } = Civil::of(epoch_ns);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
}

/// Gregorian date of a day counted from 1970-01-01. Years are taken to begin in March, so that the leap
/// day comes last and month lengths follow one linear formula.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    const DAYS_PER_ERA: i64 = 146_097; // 400 years
    let since_year_0 = days + 719_468; // 0000-03-01
    let era = since_year_0.div_euclid(DAYS_PER_ERA);
    let day_of_era = since_year_0.rem_euclid(DAYS_PER_ERA);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::to_text;

    #[test]
    fn known_dates() {
        assert_eq!(to_text(0), "1970-01-01T00:00:00");
        assert_eq!(to_text(-1), "1969-12-31T23:59:59");
        assert_eq!(to_text(951_782_400_000_000_000), "2000-02-29T00:00:00");
        assert_eq!(to_text(1_794_711_319_973_357_605), "2026-11-15T02:55:19");
    }
}
