//! The wording of refusals.

use super::rules::choices;

#[test]
fn choices_read_as_a_sentence() {
    assert_eq!(choices(&[1, 2, 4]), "1, 2 or 4");
    assert_eq!(choices(&[1]), "1");
}
