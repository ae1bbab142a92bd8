//! What arguments the kernels of a cubin take: `.nv.info.KERNEL` has a record for each.

/// The sizes of each kernel's arguments, in order.
pub(crate) fn read(cubin: &[u8]) -> Result<Vec<(String, Vec<u32>)>, &'static str> {
    if !cubin.starts_with(b"\x7fELF\x02\x01") {
        return Err("no machine code of 64 bits");
    }
    // The header of a 64-bit ELF file: where section headers start, how long one is, how many there are, which has the names.
    let (table, each) = (number(cubin, 40, 8)?, number(cubin, 58, 2)?);
    let (count, names) = (number(cubin, 60, 2)?, number(cubin, 62, 2)?);
    let section = |index: usize| -> Result<(usize, &[u8]), &'static str> {
        let header = table + index * each;
        let (name, offset, bytes) =
            (number(cubin, header, 4)?, number(cubin, header + 24, 8)?, number(cubin, header + 32, 8)?);
        let empty = number(cubin, header + 4, 4)? == NO_BITS;
        let end = offset.saturating_add(if empty { 0 } else { bytes });
        Ok((name, cubin.get(offset..end).ok_or("a section beyond the end")?))
    };
    let (_, names) = section(names)?;
    let mut kernels = Vec::new();
    for index in 0..count {
        let (name, contents) = section(index)?;
        let name =
            names.get(name..).and_then(|rest| rest.split(|byte| *byte == 0).next()).ok_or("a name beyond the end")?;
        if let Some(kernel) = std::str::from_utf8(name).ok().and_then(|name| name.strip_prefix(".nv.info.")) {
            kernels.push((kernel.to_string(), sizes(contents)?));
        }
    }
    Ok(kernels)
}

/// The type of sections without contents.
const NO_BITS: usize = 8;
/// A record that has a length and so many bytes; others have two bytes.
const WITH_LENGTH: usize = 4;
/// The record of an argument.
const ARGUMENT: usize = 0x17;

fn sizes(records: &[u8]) -> Result<Vec<u32>, &'static str> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < records.len() {
        let (form, kind, value) = (number(records, at, 1)?, number(records, at + 1, 1)?, number(records, at + 2, 2)?);
        if (form, kind) == (WITH_LENGTH, ARGUMENT) {
            // An index, the argument's place in the list, its place in memory, and flags with its size.
            let place = number(records, at + 8, 2)?;
            found.push((place, number(records, at + 12, 4)? as u32 >> 18));
        }
        at += 4 + if form == WITH_LENGTH { value } else { 0 };
    }
    found.sort_unstable();
    if found.iter().enumerate().any(|(index, (place, _))| index != *place) {
        return Err("arguments that are not numbered one by one");
    }
    Ok(found.into_iter().map(|(_, size)| size).collect())
}

fn number(bytes: &[u8], at: usize, length: usize) -> Result<usize, &'static str> {
    let bytes = bytes.get(at..at + length).ok_or("cut short")?;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | *byte as usize))
}
