//! num
