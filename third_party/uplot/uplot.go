// Package uplot has the files of uPlot 1.6.32 (npm), which draws charts in a browser, unchanged.
// LICENSE is theirs.
package uplot

import _ "embed"

// Script defines uPlot in a browser.
//
//go:embed uPlot.iife.min.js
var Script []byte

// Style is what it needs.
//
//go:embed uPlot.min.css
var Style []byte
