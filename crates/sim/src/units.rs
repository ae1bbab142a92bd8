//! Durations as people write them.

/// Reads `2ms`, `10us`, `1.5s`, `5ns`, `2m` or `1h` as nanoseconds. A bare `0` needs no unit.
pub fn parse_duration_ns(text: &str) -> Result<f64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == 'µ');
    let (number, unit) = text.split_at(digits.len());
    let scale = match unit {
        "ns" => 1.0,
        "us" | "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" | "min" => 60e9,
        "h" => 3600e9,
        "" if number == "0" => 1.0,
        _ => return Err(format!("`{text}` has no unit of time; write ns, us, ms, s, m or h after the number")),
    };
    match number.parse::<f64>() {
        Ok(value) if value >= 0.0 && (value * scale).is_finite() => Ok(value * scale),
        _ => Err(format!("`{text}` is not a time of at least 0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(parse_duration_ns("2ms"), Ok(2e6));
        assert_eq!(parse_duration_ns("1.5s"), Ok(1.5e9));
        assert_eq!(parse_duration_ns("10µs"), Ok(1e4));
        assert_eq!(parse_duration_ns("0"), Ok(0.0));
        for bad in ["", "5", "ms", "-1ms", "1e400s", "NaNs", "infs"] {
            assert!(parse_duration_ns(bad).is_err(), "{bad}");
        }
    }
}
