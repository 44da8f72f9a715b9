// Package plot draws hit rates against the size of a pool.
package plot

import (
	"fmt"
	"math"
	"strings"
)

// Curve has a rate for each size.
type Curve struct {
	Name, Color string
	Rates       []float64
}

// Sizes of a picture, in pixels.
const (
	width, height = 800, 470
	left, top     = 60., 40. // of the axes
	right, bottom = 570., 430.
)

// SVG returns the picture of some curves. Sizes are ascending, on a logarithmic scale, with their
// labels; mark is one of them, or 0. Rates are up to most.
func SVG(title string, sizes []int, label func(size int) string, mark int, most float64, curves []Curve) string {
	first := float64(sizes[0])
	scale := max(math.Log(float64(sizes[len(sizes)-1])/first), 1e-9)
	x := func(size int) float64 { return left + (right-left)*math.Log(float64(size)/first)/scale }
	y := func(rate float64) float64 { return bottom - (bottom-top)*rate/most }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif"
font-size="12"><rect width="100%%" height="100%%" fill="white"/><text x="%g" y="24" font-size="14">%s</text>
`, width, height, left, title)
	for i := range 6 {
		rate := most * float64(i) / 5
		fmt.Fprintf(&b, `<path d="M%g %.1fH%g" stroke="#ddd"/><text x="14" y="%.1f">%.3f</text>
`, left, y(rate), right, y(rate)+4, rate)
	}
	for i := 0; i < len(sizes); i += 1 + len(sizes)/9 {
		size := sizes[i]
		fmt.Fprintf(&b, `<text x="%.1f" y="%g" text-anchor="middle">%s</text>
`, x(size), bottom+18, label(size))
	}
	for i, c := range curves {
		fmt.Fprintf(&b, `<text x="%g" y="%g" fill="%s">%s</text>
<polyline fill="none" stroke="%s" stroke-width="2" points="`, right+14, top+20*float64(i+1), c.Color, c.Name, c.Color)
		for k, rate := range c.Rates {
			fmt.Fprintf(&b, "%.1f,%.1f ", x(sizes[k]), y(rate))
		}
		b.WriteString("\"/>\n")
	}
	if mark > 0 {
		fmt.Fprintf(&b, `<path d="M%.1f %gV%g" stroke="#2ca02c" stroke-dasharray="4 3"/>`, x(mark), top, bottom)
	}
	return b.String() + "</svg>\n"
}
