//! The subset hint: a gateway's list of endpoints inside which the pick must stay.
//!
//! It comes in the metadata namespace `envoy.lb.subset_hint` under `x-gateway-destination-endpoint-subset`, as a list
//! or as a comma-joined string, or a list whose items are comma-joined; blanks around items are not meant. An item
//! with a port names that port only, an item without one names every port of its address.

use std::net::{IpAddr, SocketAddr};

/// Most items kept. The longest list that can help is the pool itself, at most
/// [`proto::fleet::MAX_ENTRIES`]; what is beyond is dropped, which can only exclude.
pub const MAX_ITEMS: usize = proto::fleet::MAX_ENTRIES;

/// Where a request may go. `None` inside an option means that no hint was given; an empty subset allows nobody.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Subset {
    whole: Vec<SocketAddr>,
    hosts: Vec<IpAddr>,
}

impl Subset {
    /// Reads the items of a hint. What is no address names nobody.
    pub fn new<'a>(items: impl IntoIterator<Item = &'a str>) -> Subset {
        let mut subset = Subset::default();
        for item in items.into_iter().flat_map(|item| item.split(',')).map(str::trim).take(MAX_ITEMS) {
            if let Ok(whole) = item.parse() {
                subset.whole.push(whole);
            } else if let Ok(host) = item.trim_matches(['[', ']']).parse() {
                subset.hosts.push(host);
            }
        }
        subset
    }

    /// Whether the subset names this address.
    pub fn allows(&self, address: SocketAddr) -> bool {
        self.whole.contains(&address) || self.hosts.contains(&address.ip())
    }

    /// Whether it names nobody.
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.hosts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(items: &[&str]) -> Vec<usize> {
        let pool = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.2:8001", "10.0.0.3:8000"];
        let subset = Subset::new(items.iter().copied());
        let addresses = pool.iter().map(|a| a.parse::<SocketAddr>());
        addresses.enumerate().filter(|(_, a)| a.as_ref().is_ok_and(|a| subset.allows(*a))).map(|(i, _)| i).collect()
    }

    #[test]
    fn lists_strings_and_mixtures_mean_the_same() {
        assert_eq!(allowed(&["10.0.0.1:8000", "10.0.0.3:8000"]), [0, 3]);
        assert_eq!(allowed(&["  10.0.0.1:8000 ,10.0.0.3:8000, "]), [0, 3]);
        assert_eq!(allowed(&["10.0.0.1:8000,10.0.0.2:8001", "10.0.0.3:8000"]), [0, 2, 3]);
    }

    #[test]
    fn ports_count_where_they_are_given() {
        assert_eq!(allowed(&["10.0.0.2:8001"]), [2]);
        assert_eq!(allowed(&["10.0.0.2"]), [1, 2]);
    }

    #[test]
    fn nothing_and_nonsense_allow_nobody() {
        assert_eq!(allowed(&[]), [0usize; 0]);
        assert_eq!(allowed(&[""]), [0usize; 0]);
        assert_eq!(allowed(&["pod-a", "10.0.0.99:8000", "10.0.0:8000"]), [0usize; 0]);
        assert!(Subset::new([" , "]).is_empty());
    }
}
