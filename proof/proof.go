// Package proof checks on one GPU what the CUDA path promises, and measures how fast it is there.
// Engines and agents are processes of its own, which it kills.
package proof

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// Options of a proof.
type Options struct {
	Command []string      // of a process that calls Child
	Quick   bool          // small sizes, for software drivers: figures mean nothing
	Only    string        // one check by its name; empty: all
	Each    func(l *Line) // receives each check when it has ended; may be nil
}

// Report is the result of a proof, for --json and docs/measurements.
type Report struct {
	Version    string    `json:"version"`
	Time       time.Time `json:"time"`
	Quick      bool      `json:"quick"` // then the figures mean nothing
	GPU        string    `json:"gpu"`
	FreeMiB    int64     `json:"free_mib"` // of the GPU's memory, before all checks
	TotalMiB   int64     `json:"total_mib"`
	Host       string    `json:"host"` // kernel, processors, and the driver as the kernel knows it
	UUID       string    `json:"uuid"`
	Driver     int       `json:"driver"` // CUDA version, 1000 * major + 10 * minor
	OK         bool      `json:"ok"`     // every check passed
	TargetsMet bool      `json:"targets_met"`
	Lines      []*Line   `json:"checks"`
}

// Line is one check.
type Line struct {
	Name    string             `json:"name"`
	OK      bool               `json:"ok"`
	Error   string             `json:"error,omitempty"`
	Text    string             `json:"text"` // for people
	Figures map[string]float64 `json:"figures,omitempty"`
	Facts   map[string]string  `json:"facts,omitempty"` // this driver's choices among allowed outcomes
	Targets []Target           `json:"targets,omitempty"`
	Seconds float64            `json:"seconds"`
}

// Target is a figure with an aim. Missing it is no failure.
type Target struct {
	Name string  `json:"name"`
	Want float64 `json:"want"`
	Got  float64 `json:"got"`
	Most bool    `json:"at_most,omitempty"` // Want is the most, else the least
	Met  bool    `json:"met"`
}

// check is one property that a proof checks.
type check struct {
	name string
	run  func(*bench)
}

var checks = []check{
	{"import", checkImport}, {"order", checkOrder}, {"paths", checkPaths},
	{"transfer", checkTransfer}, {"compute", checkCompute},
	{"event-of-the-dead", checkEventAfterDeath}, {"copy-of-the-dead", checkCopyAfterDeath},
	{"engine-killed", checkEngineKilled}, {"warm-up-killed", checkWarmUpKilled}, {"agent-killed", checkAgentKilled},
	{"pin", checkPin}, {"footprint", checkFootprint},
}

// Names returns the names of the checks in their order.
func Names() (names []string) {
	for _, c := range checks {
		names = append(names, c.name)
	}
	return names
}

// Run runs the checks. It returns an error if there is nothing to run them on; failures of checks
// are in the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	r := &Report{Time: time.Now().UTC().Truncate(time.Second), Quick: o.Quick, OK: true, TargetsMet: true}
	if err := r.describe(); err != nil {
		return nil, err
	}
	for _, c := range checks {
		if o.Only != "" && o.Only != c.name {
			continue
		}
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		l := o.line(ctx, &c)
		r.Lines = append(r.Lines, l)
		r.OK = r.OK && l.OK
		for _, t := range l.Targets {
			r.TargetsMet = r.TargetsMet && t.Met
		}
		if o.Each != nil {
			o.Each(l)
		}
	}
	if len(r.Lines) == 0 {
		return nil, fmt.Errorf("check %q, allowed: %v", o.Only, Names())
	}
	return r, nil
}

// do runs a check in this process.
func (o *Options) do(ctx context.Context, c *check) *Line {
	l := &Line{Name: c.name, Figures: map[string]float64{}, Facts: map[string]string{}}
	b := &bench{ctx: ctx, sizes: fullSizes, line: l}
	if o.Quick {
		b.sizes = quickSizes
	}
	begin := time.Now()
	err := b.run(c.run)
	l.Seconds, l.OK = time.Since(begin).Seconds(), err == nil
	if err != nil {
		l.Error = err.Error()
	}
	return l
}

// describe adds the GPU and the driver to the report.
func (r *Report) describe() error {
	arena, err := mapFile(1<<20, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(arena) }()
	d, err := cuda.Open(cuda.Options{Arena: arena})
	if err != nil {
		return err
	}
	i := d.Info()
	r.Host = host()
	r.GPU, r.UUID, r.Driver, r.FreeMiB, r.TotalMiB = i.Name, i.GPU.String(), i.Driver, i.Free>>20, i.Total>>20
	return d.Close()
}

// say appends to the text for people.
func (l *Line) say(format string, args ...any) {
	if l.Text != "" {
		l.Text += "; "
	}
	l.Text += fmt.Sprintf(format, args...)
}

// aim adds a target: got should be want or more, or with most, want or less.
func (l *Line) aim(name string, got, want float64, most bool) {
	met := got >= want
	if most {
		met = got <= want
	}
	l.Targets = append(l.Targets, Target{Name: name, Want: want, Got: got, Most: most, Met: met})
}

// host describes the machine, as far as figures depend on it.
func host() string {
	text := fmt.Sprintf("%d processors", runtime.NumCPU())
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		text += ", Linux " + unix.ByteSliceToString(u.Release[:])
	}
	if driver, err := os.ReadFile("/proc/driver/nvidia/version"); err == nil {
		first, _, _ := strings.Cut(string(driver), "\n")
		text += ", " + first
	}
	return text
}
