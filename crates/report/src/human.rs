//! Numbers as people read them: three significant digits and a unit that fits.
//!
//! A value that is not a number prints as [`NOT_KNOWN`], never as zero.

/// What stands for a value that is not known.
pub const NOT_KNOWN: &str = "n/a";

/// A time given in nanoseconds: `950 ns`, `1.25 ms`, `3.00 s`.
pub fn ns(nanoseconds: f64) -> String {
    if nanoseconds.abs() >= 119.5e9 {
        return format!("{} min", three_digits(nanoseconds / 60e9));
    }
    scaled(nanoseconds, 1e3, &["ns", "µs", "ms", "s"])
}

/// Both ends of a difference in nanoseconds, in one unit and with their signs: `+0.70 to +0.90 ms`.
pub fn ns_interval(low: f64, high: f64) -> String {
    let widest = low.abs().max(high.abs());
    if !(low.is_finite() && high.is_finite()) {
        return NOT_KNOWN.to_owned();
    }
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")];
    let (scale, unit) = units.into_iter().find(|(scale, _)| widest >= 0.9995 * scale).unwrap_or((1.0, "ns"));
    format!("{} {unit}", signed_ends(low / scale, high / scale))
}

/// Both ends of a difference given as fractions, in per cent and with their signs: `-0.7 to +0.2 %`.
pub fn percent_interval(low: f64, high: f64) -> String {
    if !(low.is_finite() && high.is_finite()) {
        return NOT_KNOWN.to_owned();
    }
    let ends = [low, high].map(|end| format!("{:+.1}", 100.0 * end)).map(|text| unsigned_zero(&text));
    format!("{} to {} %", ends[0], ends[1])
}

/// Three digits of the larger end, and of the other as many decimals. An end that is not zero does not look like it where
/// one more decimal helps.
fn signed_ends(low: f64, high: f64) -> String {
    let widest = low.abs().max(high.abs());
    let decimals: usize = if widest >= 99.95 {
        0
    } else if widest >= 9.995 {
        1
    } else {
        2
    };
    let hidden = |end: &f64| *end != 0.0 && end.abs() < 0.5 * 10f64.powi(-(decimals as i32));
    let decimals = decimals + usize::from([low, high].iter().any(hidden));
    let ends = [low, high].map(|end| unsigned_zero(&format!("{end:+.decimals$}")));
    format!("{} to {}", ends[0], ends[1])
}

/// A number as it is, zero without a sign.
fn unsigned_zero(text: &str) -> String {
    let is_zero = text.bytes().all(|byte| !byte.is_ascii_digit() || byte == b'0');
    if is_zero { text.trim_start_matches(['+', '-']).to_owned() } else { text.to_owned() }
}

/// Text that begins a sentence: its first letter large.
pub fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// An amount of memory or data: `512 B`, `1.50 GiB` (powers of 1024).
pub fn bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// A whole number with thousands separators: `1,234,567`.
pub fn count(count: u64) -> String {
    group_thousands(&count.to_string())
}

/// A number without unit, three significant digits or more: `0.0123`, `12.3`, `1,234`.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return NOT_KNOWN.to_owned();
    }
    if value != 0.0 && value.abs() < 1e-4 {
        return format!("{value:.2e}");
    }
    if value != 0.0 && value.abs() < 0.995 {
        let decimals = (2.0 - value.abs().log10().floor()) as usize;
        return format!("{value:.decimals$}");
    }
    three_digits(value)
}

/// Floating-point operations per second: `123 GFLOP/s`.
pub fn flops_per_s(rate: f64) -> String {
    scaled(rate, 1e3, &["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"])
}

/// Integer operations per second: `1.2 TOP/s`.
pub fn ops_per_s(rate: f64) -> String {
    scaled(rate, 1e3, &["OP/s", "kOP/s", "MOP/s", "GOP/s", "TOP/s", "POP/s"])
}

/// Bytes per second: `12.3 GB/s` (powers of 1000).
pub fn bytes_per_s(rate: f64) -> String {
    scaled(rate, 1e3, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])
}

/// A fraction as per cent with one decimal: `0.1234` is `12.3 %`.
pub fn percent(fraction: f64) -> String {
    if !fraction.is_finite() {
        return NOT_KNOWN.to_owned();
    }
    let text = format!("{:.1} %", fraction * 100.0);
    match text.strip_prefix('-') {
        Some("0.0 %") => "0.0 %".to_owned(),
        _ => text,
    }
}

/// Goes to the largest unit in which the value prints as 1 or more; the units are `step` apart.
fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    if !value.is_finite() {
        return NOT_KNOWN.to_owned();
    }
    let mut unit = 0;
    // 999.7 prints as 1000: it belongs to the next unit already.
    while value.abs() >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    format!("{} {}", three_digits(value), units[unit])
}

fn three_digits(value: f64) -> String {
    let size = value.abs();
    if size >= 999.5 {
        group_thousands(&format!("{value:.0}"))
    } else if size >= 99.95 || value == 0.0 {
        format!("{value:.0}")
    } else if size >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

/// Thousands separators in a whole number given as text.
pub(crate) fn group_thousands(digits: &str) -> String {
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", digits),
    };
    let mut grouped = String::from(sign);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_one_unit_and_two_signs() {
        assert_eq!(ns_interval(0.7e6, 0.9e6), "+700 to +900 µs");
        assert_eq!(ns_interval(0.7e6, 1.2e6), "+0.70 to +1.20 ms");
        assert_eq!(ns_interval(-12.34e6, 0.0), "-12.3 to 0.0 ms");
        assert_eq!(ns_interval(0.02e6, 15e6), "+0.02 to +15.00 ms", "an end above zero shows");
        assert_eq!(ns_interval(0.0, 0.0), "0.00 to 0.00 ns");
        assert_eq!(ns_interval(f64::NAN, 1.0), NOT_KNOWN);
        assert_eq!(percent_interval(-0.007, 0.002), "-0.7 to +0.2 %");
        assert_eq!(percent_interval(-0.0001, 0.002), "0.0 to +0.2 %");
    }

    #[test]
    fn times() {
        let cases = [
            (0.0, "0 ns"),
            (1.0, "1.00 ns"),
            (950.4, "950 ns"),
            (999.7, "1.00 µs"),
            (12_345.0, "12.3 µs"),
            (-1_250_000.0, "-1.25 ms"),
            (3e9, "3.00 s"),
            (90e9, "90.0 s"),
            (600e9, "10.0 min"),
            (f64::NAN, "n/a"),
        ];
        for (value, text) in cases {
            assert_eq!(ns(value), text);
        }
    }

    #[test]
    fn amounts_and_rates() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(u64::MAX), "16,384 PiB");
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(flops_per_s(1.234e11), "123 GFLOP/s");
        assert_eq!(bytes_per_s(2.05e10), "20.5 GB/s");
        assert_eq!(percent(0.12345), "12.3 %");
        assert_eq!(percent(-0.00001), "0.0 %");
        assert_eq!(percent(f64::INFINITY), "n/a");
    }

    #[test]
    fn plain_numbers() {
        let cases = [
            (0.0, "0"),
            (0.012345, "0.0123"),
            (0.5, "0.500"),
            (1.0, "1.00"),
            (99.96, "100"),
            (1234.4, "1,234"),
            (-45_678.0, "-45,678"),
            (1e-7, "1.00e-7"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }
}
