//! Tables stored by column.

/// Declares a row type and the table that stores such rows, one vector per field.
macro_rules! columns {
    (
        $(#[$table_meta:meta])* table $table:ident;
        $(#[$row_meta:meta])* row $row:ident { $($(#[$field_meta:meta])* $field:ident: $kind:ty),+ $(,)? }
    ) => {
        $(#[$row_meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $row { $($(#[$field_meta])* pub $field: $kind,)+ }

        $(#[$table_meta])*
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct $table { $($(#[$field_meta])* pub $field: Vec<$kind>,)+ }

        impl $table {
            /// How many rows.
            pub fn len(&self) -> usize {
                self.start.len()
            }

            /// Whether there is no row.
            pub fn is_empty(&self) -> bool {
                self.start.is_empty()
            }

            /// Adds a row.
            pub fn push(&mut self, row: $row) {
                $(self.$field.push(row.$field);)+
            }

            /// The row with this index. Like a slice it panics beyond the end.
            pub fn get(&self, index: usize) -> $row {
                $row { $($field: self.$field[index],)+ }
            }

            /// All rows in order.
            pub fn iter(&self) -> impl Iterator<Item = $row> + '_ {
                (0..self.len()).map(|index| self.get(index))
            }

            /// Makes room for this many more rows.
            pub fn reserve(&mut self, more: usize) {
                $(self.$field.reserve(more);)+
            }

            /// Gives back unused room.
            pub fn shrink_to_fit(&mut self) {
                $(self.$field.shrink_to_fit();)+
            }

            /// Moves the rows of another table behind those of this one.
            pub fn append(&mut self, other: &mut Self) {
                $(self.$field.append(&mut other.$field);)+
            }

            /// Puts the rows into the given order: row `i` becomes what row `order[i]` was. One column at a time, so
            /// that the room for a copy is that of one column.
            pub fn reorder(&mut self, order: &[u32]) {
                $(self.$field = order.iter().map(|&index| self.$field[index as usize]).collect();)+
            }

            /// The length of row `index`, never negative.
            pub fn duration(&self, index: usize) -> i64 {
                self.end[index].saturating_sub(self.start[index]).max(0)
            }
        }
    };
}

pub(crate) use columns;

/// The order that sorts rows by `key`, ties in their present order; `None` when they are sorted already.
pub(crate) fn order_by<K: Ord>(rows: usize, key: impl Fn(usize) -> K) -> Option<Vec<u32>> {
    if (1..rows).all(|index| key(index - 1) <= key(index)) {
        return None;
    }
    let mut order: Vec<u32> = (0..rows as u32).collect();
    order.sort_by_key(|&index| key(index as usize)); // stable
    Some(order)
}
