// Package bench measures parts of kvagent, each against its reference in the same run.
package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/evict/evictsim"
)

// Command is bench with all its measurements.
func Command() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure a part against its reference in the same run"}
	bench.AddCommand(lookupCommand(), transferCommand(), policyCommand())
	return bench
}

// childProcess is a process of this program that serves a measurement. It reports that it is ready,
// and ends with its input, so it cannot outlive the measurement.
type childProcess struct {
	cmd *exec.Cmd
	in  io.Closer
	log child.Tail
}

const childReady = "ready\n"

// startChildProcess runs this program with these arguments, and waits until the child is ready.
func startChildProcess(args ...string) (*childProcess, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &childProcess{cmd: exec.Command(self, args...)}
	c.cmd.Stderr = &c.log
	in, inErr := c.cmd.StdinPipe()
	out, outErr := c.cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, err
	}
	c.in = in
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	said := make([]byte, len(childReady))
	if _, err := io.ReadFull(out, said); err != nil {
		return nil, fmt.Errorf("a process of the measurement: %w\n%s", errors.Join(err, c.close()), c.log.String())
	}
	return c, nil
}

func (c *childProcess) close() error {
	err := c.in.Close()
	return errors.Join(err, c.cmd.Wait())
}

// serveParent is the child's side. It returns at the end of the input.
func serveParent(in io.Reader, out io.Writer) error {
	if _, err := io.WriteString(out, childReady); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, in)
	return err
}

// curve is a line of a plot: the hit rate of a policy at each capacity.
type curve struct {
	name, color string
	run         func(s *evictsim.Stream, capacity int) evictsim.Result
}

// curves are those of a plot: references, and the default policy by what it is told.
func (s *policySettings) curves() []curve {
	own := func(told func(*evictsim.Stream) *evictsim.Stream) func(*evictsim.Stream, int) evictsim.Result {
		return func(s *evictsim.Stream, capacity int) evictsim.Result {
			return evictsim.Run(told(s), evict.Named(evict.DefaultName), capacity)
		}
	}
	hints := func(precision, recall float64) func(*evictsim.Stream) *evictsim.Stream {
		return func(in *evictsim.Stream) *evictsim.Stream { return in.WithHints(precision, recall, s.seed) }
	}
	return []curve{
		{"optimum", "#888888", evictsim.Optimum},
		{"hints of an oracle", "#b07aa1", own(hints(1, 1))},
		{fmt.Sprintf("hints, precision %g, recall %g", s.precision, s.recall), "#e15759",
			own(hints(s.precision, s.recall))},
		{"facts of the end", "#f28e2b", own((*evictsim.Stream).WithFacts)},
		{evict.DefaultName, "#4e79a7", own(func(s *evictsim.Stream) *evictsim.Stream { return s })},
		{"ARC", "#59a14f", evictsim.ARC},
		{"S3-FIFO", "#9c755f", evictsim.S3FIFO},
		{"LRU", "#222222", evictsim.LRU},
	}
}

// Sizes of a plot, in pixels.
const (
	plotWidth, plotHeight = 720, 440
	plotLeft, plotBottom  = 60, 400 // of the axes
	plotRight, plotTop    = 490, 40
)

// writePlot draws the hit rates of one stream against the capacity, in SVG.
func (s *policySettings) writePlot(stream *evictsim.Stream) error {
	capacities := slices.Sorted(slices.Values(s.capacities))
	low, high := math.Log(float64(capacities[0])), math.Log(float64(capacities[len(capacities)-1]))
	x := func(capacity int) float64 {
		return plotLeft + (math.Log(float64(capacity))-low)/max(1e-9, high-low)*(plotRight-plotLeft)
	}
	y := func(rate float64) float64 { return plotBottom - rate*(plotBottom-plotTop) }
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif"
font-size="12">
<rect width="100%%" height="100%%" fill="white"/>
<text x="%d" y="24" font-size="14">%s: blocks hit by capacity in blocks</text>
`, plotWidth, plotHeight, plotLeft, filepath.Base(stream.Name))
	for tenth := range 11 {
		rate := float64(tenth) / 10
		fmt.Fprintf(&b, "<path d=\"M%d %.1fH%d\" stroke=\"#dddddd\"/><text x=\"%d\" y=\"%.1f\">%.1f</text>\n",
			plotLeft, y(rate), plotRight, plotLeft-26, y(rate)+4, rate)
	}
	for _, capacity := range capacities {
		fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n",
			x(capacity), plotBottom+18, capacity)
	}
	for i, c := range s.curves() {
		fmt.Fprintf(&b, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", c.color)
		for _, capacity := range capacities {
			fmt.Fprintf(&b, "%.1f,%.1f ", x(capacity), y(c.run(stream, capacity).HitRate()))
		}
		fmt.Fprintf(&b, "\"/>\n<text x=\"%d\" y=\"%d\" fill=\"%s\">%s</text>\n",
			plotRight+14, plotTop+20*(i+1), c.color, c.name)
	}
	b.WriteString("</svg>\n")
	return os.WriteFile(s.plot, b.Bytes(), 0o644)
}
