//! freestone-testkit
