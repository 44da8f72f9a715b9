package mockengine

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"
	"time"
)

// A driver sends commands to an engine, which executes them in order, and receives reports, one
// JSON object a line each way.

// Command is one line to an engine.
type Command struct {
	Op string `json:"op"` // start, run, leave

	// start
	Config *Config     `json:"config,omitempty"`
	Link   *LinkConfig `json:"link,omitempty"`

	// run: until the virtual time, in ms, or with -1 until nothing is left; then up to SettleMS for
	// saves to end
	Until    float64   `json:"until,omitempty"`
	SettleMS int       `json:"settle_ms,omitempty"`
	Requests []Request `json:"requests,omitempty"`
	Strike   *Strike   `json:"strike,omitempty"`
}

// Strike is a SIGKILL that an engine sends at a moment when the agent has a job of it.
type Strike struct {
	Agent  bool `json:"agent,omitempty"`  // to the agent; otherwise to the engine's own process
	Middle bool `json:"middle,omitempty"` // in the middle of a step's kernels, on which a job waits
	After  int  `json:"after"`            // jobs from now on
}

// Report is one line back.
type Report struct {
	Op string `json:"op"` // ran, left, wrong, strike, error

	Outcomes []Outcome `json:"outcomes,omitempty"`
	Stats    *Stats    `json:"stats,omitempty"`
	InUse    int       `json:"in_use,omitempty"` // left: blocks that are not free
	Attached bool      `json:"attached,omitempty"`
	PID      int       `json:"pid,omitempty"` // strike: of the process that was hit
	Text     string    `json:"text,omitempty"`
}

// Limits of a driven process.
const (
	maxCommand  = 64 << 20         // bytes of a line
	startWithin = 3 * time.Second  // for an agent to appear; the engine runs without one, too
	drainWithin = 30 * time.Second // for jobs to end when an engine leaves
)

// Drive executes the commands from in until one is to leave, or in ends, and writes reports to out.
// An engine that has not left is then abandoned: the process ends, as in a crash.
func Drive(in io.Reader, out io.Writer) (err error) {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), maxCommand)
	var g *driven
	for lines.Scan() {
		var c Command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return fmt.Errorf("command: %w", err)
		}
		switch {
		case g == nil && c.Config != nil && c.Link != nil:
			if g, err = assemble(*c.Config, *c.Link, out); err != nil {
				return err
			}
			ctx, stop := context.WithTimeout(context.Background(), startWithin)
			_ = g.link.Wait(ctx) // without an agent it runs, too
			stop()
		case g != nil && c.Op == "run":
			g.run(&c)
		case g != nil && c.Op == "leave":
			g.leave()
			return nil
		default:
			return fmt.Errorf("op is %q, allowed are start, with config and link, then run and leave", c.Op)
		}
	}
	return lines.Err()
}

// driven is an engine that reports what it does.
type driven struct {
	out     *json.Encoder
	engine  *Engine
	link    *Link
	workers *Workers
	strike  *Strike
}

// assemble creates an engine; its link begins to connect.
func assemble(cfg Config, where LinkConfig, out io.Writer) (*driven, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w, err := NewWorkers(&cfg)
	if err != nil {
		return nil, err
	}
	g := &driven{out: json.NewEncoder(out), workers: w, link: NewLink(cfg, where, w)}
	g.engine = NewEngine(cfg, g.link, w)
	g.engine.OnWrong = func(text string) { g.report(&Report{Op: "wrong", Text: text}) }
	g.engine.OnSubmit = g.submitted
	return g, nil
}

func (g *driven) run(c *Command) {
	if c.Strike != nil {
		g.arm(c.Strike)
	}
	g.engine.Add(c.Requests...)
	g.engine.Run(c.Until)
	g.engine.Settle(time.Duration(c.SettleMS) * time.Millisecond)
	g.report(g.state("ran"))
}

func (g *driven) state(op string) *Report {
	s := g.engine.Stats()
	return &Report{Op: op, Outcomes: g.engine.Outcomes(), Stats: &s, Attached: g.link.attached() != nil}
}

// leave ends the engine in order: jobs, sessions, memory.
func (g *driven) leave() {
	g.engine.Drain(drainWithin)
	for _, ev := range g.link.Close() {
		g.engine.over(ev)
	}
	r := g.state("left")
	r.InUse = g.engine.BlocksInUse()
	g.workers.Close()
	g.report(r)
}

// report writes a line. That nobody reads it is no error: the end of this process's input ends it.
func (g *driven) report(r *Report) { _ = g.out.Encode(r) }

// arm prepares a strike.
func (g *driven) arm(s *Strike) {
	g.strike = s
	g.engine.Trap = nil
	if s.Middle {
		g.engine.Trap = g.hit
	}
}

// submitted is called after each submitted job.
func (g *driven) submitted() {
	if g.strike == nil || g.strike.Middle {
		return
	}
	if g.strike.After--; g.strike.After < 0 {
		g.hit()
	}
}

// hit strikes if the agent really has a job now, otherwise at the next opportunity.
func (g *driven) hit() {
	jobs := g.engine.Jobs() - len(g.link.Events())
	pid := syscall.Getpid()
	if a := g.link.attached(); g.strike.Agent && a == nil {
		return
	} else if g.strike.Agent {
		pid = a.pid
	}
	if jobs <= 0 || pid <= 1 {
		return
	}
	g.strike, g.engine.Trap = nil, nil
	g.report(&Report{Op: "strike", PID: pid})
	err := syscall.Kill(pid, syscall.SIGKILL)
	if err != nil && !errors.Is(err, syscall.ESRCH) { // it may have ended meanwhile
		g.report(&Report{Op: "error", Text: fmt.Sprintf("kill %d: %v", pid, err)})
	}
}

// SoloOptions configures Solo.
type SoloOptions struct {
	Attach    time.Duration // longest wait for an agent
	Hold      bool          // stay registered after the last request until ctx is done
	KillAfter int           // kill this process after this many jobs, with one in flight; 0: never
}

// Solo runs requests through one engine against an agent and writes reports to out, as Drive does.
// When ctx is done it leaves the agent in order, and reports requests that were not run.
func Solo(ctx context.Context, cfg Config, where LinkConfig, requests []Request, o SoloOptions, out io.Writer) error {
	g, err := assemble(cfg, where, out)
	if err != nil {
		return err
	}
	wait, stop := context.WithTimeout(ctx, o.Attach)
	defer stop()
	if err := g.link.Wait(wait); err != nil {
		g.leave()
		return fmt.Errorf("no agent: %w", err)
	}
	g.engine.Stop = func() bool { return ctx.Err() != nil }
	if o.KillAfter > 0 {
		g.arm(&Strike{After: o.KillAfter})
	}
	g.run(&Command{Until: -1, SettleMS: 1000, Requests: requests})
	if o.Hold {
		<-ctx.Done()
	}
	g.leave()
	if n := g.engine.Stats().WrongBytes; n > 0 {
		return fmt.Errorf("%d wrong bytes", n)
	}
	if n := g.engine.Live(); n > 0 {
		return fmt.Errorf("ended with %d of %d requests left: %w", n, len(requests), context.Cause(ctx))
	}
	return nil
}

// Limits of a fill.
const (
	fillWave   = 4096 // blocks of one save
	fillTries  = 100  // saves of one wave: an agent may be busy
	fillWithin = time.Minute
)

// filler is an engine whose only work is to save a chain of blocks under given hashes.
type filler struct {
	cfg     Config
	workers *Workers
	link    *Link
	step    uint64
	job     uint64
}

// Fill registers an engine with an agent, which must appear within attach, saves one block for each
// hash of a chain, in order, calls filled, and leaves. All hashes have one length, 1 to 32 bytes.
func Fill(ctx context.Context, cfg Config, where LinkConfig, hashes [][]byte, attach time.Duration,
	filled func()) error {
	cfg.Blocks, cfg.Groups = fillWave, 1
	if err := cfg.Validate(); err != nil {
		return err
	}
	w, err := NewWorkers(&cfg)
	if err != nil {
		return err
	}
	defer w.Close()
	f := &filler{cfg: cfg, workers: w, link: NewLink(cfg, where, w)}
	defer f.link.Close()
	wait, stop := context.WithTimeout(ctx, attach)
	defer stop()
	if err := f.link.Wait(wait); err != nil {
		return fmt.Errorf("no agent: %w", err)
	}
	var parent []byte
	for wave := range slices.Chunk(hashes, fillWave) {
		if err := f.wave(ctx, parent, wave); err != nil {
			return err
		}
		parent = wave[len(wave)-1]
	}
	filled()
	return nil
}

// wave computes blocks on all ranks and saves them, and retries where the agent is busy.
func (f *filler) wave(ctx context.Context, parent []byte, hashes [][]byte) error {
	f.step++
	k := &work{step: f.step}
	words := f.cfg.BlockBytes / layers / wordBytes
	s := Section{Parent: parent}
	for i, h := range hashes {
		sum := sha256.Sum256(h)
		seed := binary.LittleEndian.Uint64(sum[:])
		from := len(k.bases)
		for w := range words {
			k.bases = append(k.bases, seed+uint64(w))
		}
		k.pieces = append(k.pieces, piece{block: BlockID(i + 1), from: from, to: len(k.bases)})
		s.Hashes = append(s.Hashes, h...)
		s.Blocks = append(s.Blocks, BlockID(i+1))
	}
	f.workers.launch(k)
	defer k.done.Wait()
	for range fillTries {
		stored, err := f.try(ctx, s)
		if stored || err != nil {
			return err
		}
		sleep(ctx, redialFirst)
	}
	return errors.New("the agent did not take the blocks: pool full, or saves off")
}

// try saves once; it returns false if not everything was taken.
func (f *filler) try(ctx context.Context, s Section) (bool, error) {
	ctx, stop := context.WithTimeout(ctx, fillWithin)
	defer stop()
	f.job++
	j := &Job{ID: f.job, Kind: SaveJob, Step: f.step, Event: f.workers.event(f.step), Revoke: ^uint32(0),
		Sections: []Section{s}}
	if !f.link.Submit(j) {
		return false, ctx.Err()
	}
	for {
		select {
		case ev := <-f.link.Events():
			if ev.Job == f.job {
				return allStored(ev.Status), nil
			}
		case <-ctx.Done():
			return false, fmt.Errorf("save of %d blocks: %w", len(s.Blocks), ctx.Err())
		}
	}
}

// allStored reports whether every block is stored or was already; a nil status, of a lost agent, is
// neither.
func allStored(status []uint8) bool {
	for _, s := range status {
		if s > statusExists {
			return false
		}
	}
	return len(status) > 0
}
