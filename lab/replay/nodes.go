package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tierspec"
	"github.com/kvagent/kvagent/settings"
)

// maxNodes is the most agents of one replay.
const maxNodes = 16

// tierArgs returns the settings of a node's agent: its own tiers, then the shared one, and a
// directory of its own for its state.
func (s *scenario) tierArgs(dir string, node int) (args []string) {
	for _, text := range []string{ownDisk(s.tiers, node), s.shared} {
		if text != "" {
			args = append(args, "--tier", text)
		}
	}
	if len(args) == 0 {
		return nil
	}
	return append(args, "--tier-state", filepath.Join(dir, "state"))
}

// ownDisk gives every node except the first a directory of its own below that of a disk tier.
func ownDisk(text string, node int) string {
	if node == 0 || !strings.HasPrefix(text, tierspec.SchemeDisk+":") {
		return text
	}
	where, options, _ := strings.Cut(text, "?")
	return fmt.Sprintf("%s/node%d?%s", where, node, options)
}

// launchNodes starts the agents. They are in nodes from then on, whatever the error.
func (r *replay) launchNodes(ctx context.Context) error {
	pool := r.set.poolSize(&r.cfg, r.records)
	for node := range max(r.set.nodes, 1) {
		a, err := newAgent(pool, r.set, node, r.exits)
		if err != nil {
			return err
		}
		r.nodes = append(r.nodes, a)
		if err := a.start(ctx); err != nil {
			return err
		}
	}
	for _, a := range r.nodes {
		if err := a.awaitTiers(ctx, r.set.tiersIn); err != nil {
			return err
		}
	}
	return nil
}

// awaitTiers waits that long until all tiers of an agent answer, and names one that does not. 0
// does not wait.
func (a *agentProcess) awaitTiers(ctx context.Context, within time.Duration) error {
	if within == 0 {
		return nil
	}
	st, err := a.until(ctx, within, func(st *admin.Status) bool { return silentTier(st) == nil })
	if err != nil {
		return fmt.Errorf("status at the start: %w", err)
	}
	if silent := silentTier(&st); silent != nil {
		return fmt.Errorf("tiers-within: %s does not answer within %v: %s", silent.Name, within, silent.Store.Reason)
	}
	return nil
}

// silentTier returns a tier that does not answer, or nil. A store that reports no state counts as
// answering.
func silentTier(st *admin.Status) *pool.TierStatus {
	if st.Tiers == nil {
		return nil
	}
	for i := range st.Tiers.Tiers {
		if t := &st.Tiers.Tiers[i]; t.Store.State != "" && t.Store.State != "ok" {
			return t
		}
	}
	return nil
}

// stopNodes ends all agents concurrently, each within that time.
func (r *replay) stopNodes(within time.Duration) error {
	bad := make([]error, len(r.nodes))
	var stopping sync.WaitGroup
	for i, a := range r.nodes {
		stopping.Go(func() { bad[i] = a.stop(within) })
	}
	stopping.Wait()
	return errors.Join(bad...)
}

// node returns the node of an engine.
func (r *replay) node(engine int) *agentProcess { return r.nodes[engine%len(r.nodes)] }

// size is what agents have of memory beside their pools, in KiB, of descriptors and of goroutines.
type size [3]int

// noteSize adds the size of all agents, if one that was started here runs.
func (r *replay) noteSize(ctx context.Context) {
	var all size
	for _, a := range r.nodes {
		if c := a.current(); c != nil { // it was started here, and runs
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.OS.Pid)) // one that ends now has none
			files, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.OS.Pid))
			metrics, _ := a.admin.Get(ctx, "/metrics")
			all[0] += after("\nRssAnon:", text)
			all[1] += len(files)
			all[2] += after("\ngo_goroutines ", metrics)
		}
	}
	if all[1] > 0 {
		r.sizes = append(r.sizes, all)
	}
}

// after returns the number after a name in a text, or 0.
func after(name string, text []byte) int {
	_, rest, _ := strings.Cut(string(text), name)
	number, _ := strconv.Atoi(strings.Fields(rest + " 0")[0])
	return number
}

// growth returns by how much the greatest sizes of the second half exceed those of the first.
func growth(sizes []size) (most float64) {
	for what := range len(size{}) {
		var halves [2]int
		for i, one := range sizes {
			half := 2 * i / len(sizes)
			halves[half] = max(halves[half], one[what])
		}
		most = max(most, ratio(halves[1], halves[0])-1)
	}
	return most
}

// empty reports whether an agent has forgotten all engines.
func empty(st *admin.Status) bool { return st.Leases+st.Regions+st.Engines+openImports(st) == 0 }

// source has the origin of loaded blocks, over all nodes, in the last incarnation of each agent.
type source struct {
	Name   string `json:"name"` // memory, or a tier's
	Blocks uint64 `json:"blocks"`
}

// addSources adds what one agent reports.
func (r *replay) addSources(st *admin.Status) {
	loaded := st.BlocksLoaded / uint64(max(r.set.ranks, 1))
	if st.Tiers != nil {
		for i := range st.Tiers.Tiers {
			t := &st.Tiers.Tiers[i]
			r.addSource(t.Name, t.Hits)
			loaded -= min(loaded, t.Hits) // each was brought to memory first
		}
	}
	r.addSource("memory", loaded)
}

func (r *replay) addSource(name string, blocks uint64) {
	all := &r.result.Sources
	i := slices.IndexFunc(*all, func(s source) bool { return s.Name == name })
	if i < 0 {
		*all = append(*all, source{Name: name, Blocks: blocks})
		return
	}
	(*all)[i].Blocks += blocks
}

// sourcesText formats the sources.
func sourcesText(all []source) string {
	var parts []string
	for _, s := range all {
		parts = append(parts, fmt.Sprintf("%s %s", s.Name, settings.Thousands(int(s.Blocks))))
	}
	return strings.Join(parts, ", ")
}

// verifySample is more than serve's default: a check could be wrong where engines are killed, or
// revoke their saves.
const verifySample = 10 // one block in so many

// Times of the agent's process.
const (
	agentUpWithin   = time.Minute
	agentDownWithin = 30 * time.Second
	agentPoll       = 2 * time.Millisecond // between polls of an agent that starts or cleans up
)

// agentProcess is the agent of a replay: a child process, or one that runs already.
type agentProcess struct {
	daemon
	node    int
	dir     string
	session string
	private bool // dir is removed at the end
	admin   *adminclient.Client
}

// useAgent returns an agent that runs: its socket directory, or its session socket.
func useAgent(path string) *agentProcess {
	dir := strings.TrimSuffix(path, "/session.sock")
	return &agentProcess{dir: dir, session: filepath.Join(dir, "session.sock"), admin: adminclient.New(dir)}
}

// newAgent returns the agent of a node in a directory of its own, not yet started. It sends to
// exits when the agent ends unexpectedly.
func newAgent(pool int64, s *scenario, node int, exits chan error) (*agentProcess, error) {
	dir, err := os.MkdirTemp("", "kvagent-replay-")
	if err != nil {
		return nil, err
	}
	a := useAgent(dir)
	a.node, a.private = node, true
	a.name, a.struck, a.exits = fmt.Sprintf("the agent of node %d", node), true, exits
	a.command = []string{s.kvagent, "serve", "--socket-dir", dir, "--pool", settings.FormatSize(pool),
		"--integrity", s.integrity,
		"--verify-sample", strconv.Itoa(verifySample), "--eviction", s.eviction, "--device", s.device, "--log-level",
		"warn"}
	if s.dramPath != "" {
		path := s.dramPath
		if node > 0 {
			path = fmt.Sprintf("%s.node%d", path, node)
		}
		a.command = append(a.command, "--dram-path", path)
	}
	a.command = append(a.command, s.tierArgs(dir, node)...)
	return a, nil
}

// start starts an incarnation and waits until it answers.
func (a *agentProcess) start(ctx context.Context) error {
	c, err := a.launch()
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, agentUpWithin)
	defer stop()
	for {
		if _, err := a.status(ctx); err == nil {
			return nil
		}
		select {
		case <-c.Done:
			return a.failed("ended at its start", c.Err)
		case <-ctx.Done():
			return a.failed("does not answer", ctx.Err())
		case <-time.After(agentPoll):
		}
	}
}

func (a *agentProcess) status(ctx context.Context) (st admin.Status, err error) {
	body, err := a.admin.Get(ctx, "/status")
	if err == nil {
		err = json.Unmarshal(body, &st)
	}
	return st, err
}

// until polls the agent's status until ok accepts it, at most that long, and returns the last one.
func (a *agentProcess) until(ctx context.Context, within time.Duration,
	ok func(*admin.Status) bool) (st admin.Status, err error) {
	for end := time.Now().Add(within); ; sleepUntil(ctx, nil, agentPoll) {
		if st, err = a.status(ctx); err != nil || ok(&st) || time.Now().After(end) {
			return st, err
		}
	}
}

// stop ends the agent in order, within that time.
func (a *agentProcess) stop(within time.Duration) error {
	err := a.end(within)
	if a.private {
		err = errors.Join(err, os.RemoveAll(a.dir))
	}
	return err
}

// reportWithin is how long the report of an engine that killed an agent may be in transit. Tests
// replace it.
var reportWithin = 5 * time.Second

// daemon is a process that runs beside the engines, an agent or the server of a shared tier,
// through all its incarnations.
type daemon struct {
	name    string   // in errors
	command []string // program and arguments; nil: it was not started here
	struck  bool     // engines may kill it, and report so
	exits   chan error
	log     child.Tail

	mu struct {
		sync.Mutex
		child   *incarnation
		resumed chan struct{} // closed when it continues; nil while it is not stopped
		pauses  int
		kills   int
	}
	pausing sync.WaitGroup
}

// incarnation is one process of a daemon.
type incarnation struct {
	*child.Process
	wanted   bool          // it was killed on purpose, or is to end
	expected chan struct{} // closed with that
}

func newIncarnation(p *child.Process) *incarnation {
	return &incarnation{Process: p, expected: make(chan struct{})}
}

// want records, once, that the end of the incarnation is intended. It returns false if it was
// recorded before. The daemon's lock is held.
func (c *incarnation) want() bool {
	if c.wanted {
		return false
	}
	c.wanted = true
	close(c.expected)
	return true
}

// launch starts an incarnation. An error is sent to exits if it ends unexpectedly.
func (d *daemon) launch() (*incarnation, error) {
	cmd := exec.Command(d.command[0], d.command[1:]...)
	cmd.Stdout, cmd.Stderr = &d.log, &d.log
	started, err := child.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.name, err)
	}
	c := newIncarnation(started)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.child = c
	go d.reportEnd(c) // it ends with the child, which end waits for
	return c, nil
}

// reportEnd reports an incarnation that ends unexpectedly. The report of an engine that killed it
// may still be in transit.
func (d *daemon) reportEnd(c *incarnation) {
	<-c.Done
	within := reportWithin
	if !d.struck {
		within = 0
	}
	limit := time.NewTimer(within)
	defer limit.Stop()
	select {
	case <-c.expected:
	case <-limit.C:
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.wanted {
		return
	}
	select {
	case d.exits <- d.failed("ended unexpectedly", c.Err):
	default:
	}
}

// failed returns an error with what the daemon said.
func (d *daemon) failed(how string, err error) error {
	return fmt.Errorf("%s %s: %w\n%s", d.name, how, err, d.log.String())
}

// current returns the incarnation that runs, or ran last; nil if it was not started here.
func (d *daemon) current() *incarnation {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.child
}

// expectDeath records that the end of an incarnation is intended, and kills it. It returns false if
// that was recorded before, or if it has ended and another one has begun.
func (d *daemon) expectDeath(c *incarnation) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c == nil || c != d.mu.child || !c.want() {
		return false
	}
	d.mu.kills++
	c.Signal(syscall.SIGKILL) // an engine that reports a kill may itself have been killed before it sent the signal
	return true
}

// pause stops the incarnation for a while, or until it ends: its sockets stay open but do not
// answer. It returns false if it is stopped or killed already.
func (d *daemon) pause(ctx context.Context, long time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.mu.child
	if d.mu.resumed != nil || c.wanted || c.OS.Signal(syscall.SIGSTOP) != nil {
		return false
	}
	d.mu.resumed = make(chan struct{})
	d.mu.pauses++
	d.pausing.Go(func() {
		sleepUntil(ctx, c.Done, long)
		d.mu.Lock()
		defer d.mu.Unlock()
		close(d.mu.resumed)
		d.mu.resumed = nil
		c.Signal(syscall.SIGCONT)
	})
	return true
}

func (d *daemon) isPaused() bool { return d.resumed() != nil }

// resumed returns a channel that is closed when the daemon continues; nil if it is not stopped.
func (d *daemon) resumed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.resumed
}

// faults returns how often the daemon was killed and stopped.
func (d *daemon) faults() (kills, pauses int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.kills, d.mu.pauses
}

// end ends the daemon in order, within that time. One that was not started here is left alone.
func (d *daemon) end(within time.Duration) error {
	d.pausing.Wait()
	d.mu.Lock()
	c := d.mu.child
	killed := c != nil && !c.want()
	d.mu.Unlock()
	if c == nil {
		return nil
	}
	if err := c.End(within); err != nil {
		return d.failed("did not end", err)
	}
	if c.Err != nil && !killed && d.struck {
		return d.failed("did not end in order", c.Err)
	}
	return nil
}

// sleepUntil waits that long, or until ctx or done, which may be nil, is done.
func sleepUntil(ctx context.Context, done <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-done:
	case <-ctx.Done():
	}
}
