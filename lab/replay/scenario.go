package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/tierspec"
	"github.com/kvagent/kvagent/settings"
)

// scenario is what a run is made of, and what is expected of it.
type scenario struct {
	files []string // the settings that are not on the command line

	trace    string
	requests int
	duration time.Duration
	pace     time.Duration
	seed     uint64

	engines       int
	engineBlocks  int // 0: enough for the largest request, at least 2,000, or 512 with many engines
	blockBytes    int64
	pool          int64 // 0: what the trace needs
	ranks, groups int
	abortRate     share
	lookupTimeout time.Duration
	kernelLag     time.Duration

	kvagent   string // the program to start; empty: the one in this program's folder
	socket    string
	integrity string
	eviction  string
	device    string

	dramPath string
	tiers    string // of each node
	nodes    int
	shared   string        // a tier of all nodes
	tiersIn  time.Duration // for all tiers to answer before the first request; 0: do not wait

	killEngine, killAgent, killMover, killServer int // every this many requests
	pauseEngine, pauseAgent, pauseServer         int
	pauseFor, serverDown                         time.Duration
	server                                       string        // command line of the shared tier's server
	stalledAfter                                 time.Duration // without a report of any engine

	expect expectations

	json, progress bool
}

func newScenario() *scenario {
	return &scenario{
		nodes: 1, blockBytes: 16 << 10, ranks: 1, groups: 1, pauseFor: 10 * time.Second,
		serverDown: time.Second, stalledAfter: 3 * time.Minute, integrity: settings.IntegrityFull,
		eviction: evict.DefaultName, device: settings.DeviceAuto, lookupTimeout: 100 * time.Millisecond,
	}
}

// fileKey is the flag that names a file of the scenario.
const fileKey = "scenario"

// addFlags adds what people set for a run. Of these the first five may be in a scenario's file too.
func (s *scenario) addFlags(f *pflag.FlagSet) {
	f.Var(settings.Count(&s.requests, 0, 1<<30), "requests", "replay only this many requests; 0 is all")
	f.Var(settings.Count(&s.engines, 0, 1024), "engines", "engines; 0 is 2, or one for each node if there are more")
	f.Var(settings.Duration(&s.pace, 0, 24*time.Hour), "pace",
		"take at least this long, to be watched; 0 is as fast as possible")
	f.Uint64Var(&s.seed, "seed", 0, "seed of all random choices; 0 takes one from the clock and prints it")
	f.Var(settings.Choice(&s.device, settings.Devices), "device",
		"device of the agent that is started; with cuda the engines are on the only GPU too, every second one "+
			"in virtual memory")
	f.StringVar(&s.trace, "trace", "",
		"the trace: one JSON object a line, in any order, with timestamp, hash_ids and, optionally, "+
			"input_length and output_length")
	f.StringArrayVar(&s.files, fileKey, nil, "YAML file with what the run is made of (below); may be given several "+
		"times: of a setting that several have, the first counts")
	f.StringVar(&s.kvagent, "kvagent", "", "the kvagent to start; default: the one in this program's folder")
	f.StringVar(&s.socket, "socket", "",
		"socket directory, or session socket, of a running agent; default: start one")
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	f.BoolVar(&s.progress, "progress", false, "show how far it is")
}

// addSettings adds what only a scenario's file has.
func (s *scenario) addSettings(f *pflag.FlagSet) {
	f.Var(settings.Duration(&s.duration, 0, 24*time.Hour), "duration",
		"repeat the replay, with new prompts, for this long")
	f.Var(settings.Count(&s.engineBlocks, 0, mockengine.MaxBlocks), "engine-blocks",
		"KV cache blocks of one engine; 0 is 2000, or 512 from 8 engines on, but enough for the largest request")
	f.Var(settings.Size(&s.blockBytes, 64, 1<<30), "block-bytes", "bytes of one block on one rank")
	f.Var(settings.Size(&s.pool, 0, dram.MaxBytes), "pool", "the agent's pool; 0 is as much as the trace fills")
	f.Var(settings.Count(&s.ranks, 1, mockengine.MaxRanks), "ranks", "tensor-parallel ranks of one engine")
	f.Var(settings.Count(&s.groups, 1, mockengine.MaxGroups), "groups",
		"KV cache groups; every second one has blocks of twice the tokens")
	f.Var(&s.abortRate, "abort-rate", "requests whose client disconnects")
	f.Var(settings.Duration(&s.lookupTimeout, time.Millisecond, time.Minute), "lookup-timeout",
		"a look-up that takes longer is a miss")
	f.Var(settings.Duration(&s.kernelLag, 0, time.Second), "kernel-lag",
		"delay a step's kernels at random by up to this much")
	f.Var(settings.Choice(&s.integrity, []string{settings.IntegrityFull, settings.IntegrityHeader}), "integrity",
		"integrity of the agent that is started")
	f.Var(settings.Choice(&s.eviction, evict.Names), "eviction", "eviction of the agent that is started")
	f.StringVar(&s.dramPath, "dram-path", "", "file on tmpfs or hugetlbfs for the pool, which then outlives kills")
	f.StringVar(&s.tiers, "tier", "", "tiers below each node's pool, as for serve")
	f.Var(settings.Count(&s.nodes, 1, maxNodes), "nodes", "agents, each with its own pool and its share of engines")
	f.StringVar(&s.shared, "shared", "", "a tier of all nodes, below their own")
	f.Var(settings.Duration(&s.tiersIn, 0, time.Hour), "tiers-within",
		"begin when every tier answers, and fail if one does not within this time; 0 does not wait")
	f.StringVar(&s.server, "server", "", "shell command that becomes the server of the shared tier (exec); it is "+
		"started before the agents and ended after them")
	for _, one := range s.faults(new(Faults)) {
		f.Var(settings.Count(one.every, 0, 1<<30), one.name+"-every", one.what+" every this many requests; 0 is never")
	}
	f.Var(settings.Duration(&s.pauseFor, time.Millisecond, time.Hour), "pause-for", "how long a pause is")
	f.Var(settings.Duration(&s.serverDown, 0, time.Hour), "server-down",
		"how long after a kill the server is started again, unless all requests are over by then")
	f.Var(settings.Duration(&s.stalledAfter, time.Second, 24*time.Hour), "stalled-after",
		"fail when no engine has reported for this long, and name what is waited for; longer than pause-for")
	s.expect.addSettings(f)
}

// share is a setting from 0 to 1.
type share float64

// Type implements pflag.Value.
func (v *share) Type() string { return "share" }

// String implements pflag.Value.
func (v *share) String() string { return strconv.FormatFloat(float64(*v), 'g', -1, 64) }

// Set implements pflag.Value.
func (v *share) Set(text string) error {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !(f >= 0 && f <= 1) {
		return errors.New("allowed: 0 to 1")
	}
	*v = share(f)
	return nil
}

// fileHelp lists the settings that only a scenario's file has.
func fileHelp() string {
	f, text := pflag.NewFlagSet("", pflag.ContinueOnError), new(strings.Builder)
	f.SortFlags = false
	newScenario().addSettings(f)
	f.VisitAll(func(one *pflag.Flag) { fmt.Fprintf(text, "  %-22s %s\n", one.Name, one.Usage) })
	return text.String()
}

// defaultEngines is the least number of engines by default.
const defaultEngines = 2

// read reads the scenario's files, sets defaults that depend on other settings, and checks all of
// them. flags are the command's.
func (s *scenario) read(flags *pflag.FlagSet) error {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	all.AddFlagSet(flags)
	s.addSettings(all)
	for _, path := range s.files {
		if err := settings.FillFile(all, fileKey, path); err != nil {
			return err
		}
	}
	for _, text := range []*string{&s.tiers, &s.shared, &s.dramPath} {
		*text = os.ExpandEnv(*text)
	}
	if s.engines == 0 {
		s.engines = max(defaultEngines, s.nodes)
	}
	if self, err := os.Executable(); err == nil && s.kvagent == "" {
		s.kvagent = filepath.Join(filepath.Dir(self), "kvagent")
	}
	return s.check()
}

// setVariables sets what the tiers and the server of a scenario may name: $KVBENCH_DIR, an empty
// directory, $KVBENCH_PORT and $KVBENCH_PORT2, free ports of loopback, and $KVBENCH_KEY, a key for
// servers of this run. The caller removes the directory.
func setVariables() (remove func(), err error) {
	dir, err := os.MkdirTemp("", "kvbench-replay-")
	if err != nil {
		return nil, err
	}
	remove = func() { _ = os.RemoveAll(dir) } // what is left does not change the result
	all := map[string]string{"KVBENCH_DIR": dir, "KVBENCH_KEY": filepath.Base(dir)}
	for _, name := range []string{"KVBENCH_PORT", "KVBENCH_PORT2"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return remove, err
		}
		defer l.Close() // after both are known, so that they differ
		_, all[name], _ = net.SplitHostPort(l.Addr().String())
	}
	for name, value := range all {
		err = errors.Join(err, os.Setenv(name, value))
	}
	return remove, err
}

// check checks the combination of the settings.
func (s *scenario) check() error {
	var bad []error
	if s.trace == "" {
		bad = append(bad, errors.New("trace must be given"))
	}
	if s.socket != "" && s.killAgent+s.killMover+s.pauseAgent > 0 {
		bad = append(bad, errors.New("socket: an agent that was not started here is neither killed nor paused, nor "+
			"its movers"))
	}
	if s.socket != "" && (s.nodes > 1 || s.shared+s.tiers+s.dramPath != "") {
		bad = append(bad, errors.New("socket: an agent that was not started here has its own dram-path and tiers, "+
			"and is the only node"))
	}
	if _, err := exec.LookPath(s.kvagent); s.socket == "" && err != nil {
		bad = append(bad, fmt.Errorf("kvagent: %q, allowed: a program that can be run: %w", s.kvagent, err))
	}
	if s.nodes > s.engines {
		bad = append(bad, fmt.Errorf("nodes: %d, allowed: 1 to %d (engines)", s.nodes, s.engines))
	}
	return errors.Join(append(bad, s.checkTiers(), s.checkFaults(), s.expect.check())...)
}

func (s *scenario) checkTiers() error {
	var all []*tierspec.Spec
	var bad []error
	for name, text := range map[string]string{"tier": s.tiers, "shared": s.shared} {
		if err := tierspec.Setting(&all).Set(text); text != "" && err != nil {
			bad = append(bad, fmt.Errorf("%s: %s: %w", name, tierspec.Shown(text), err))
		}
	}
	return errors.Join(bad...)
}

// checkFaults checks the combination of the settings of kills and pauses.
func (s *scenario) checkFaults() error {
	var bad []error
	if s.server == "" && s.killServer+s.pauseServer > 0 {
		bad = append(bad, errors.New("kill-server-every, pause-server-every: allowed with server"))
	}
	if s.server != "" && s.shared == "" {
		bad = append(bad, fmt.Errorf("server: %q, allowed: a command line, with shared", s.server))
	}
	if pauses := s.pauseEngine + s.pauseAgent + s.pauseServer; pauses > 0 &&
		s.pauseFor >= s.stalledAfter {
		bad = append(bad, fmt.Errorf("pause-for: %v, allowed: 1ms to less than stalled-after (%v)", s.pauseFor,
			s.stalledAfter))
	}
	if s.killMover > 0 && (s.device == settings.DeviceAuto || s.device == settings.DeviceHost) {
		bad = append(bad, fmt.Errorf("device: %q has no mover, allowed with kill-mover-every: %s, %s", s.device,
			settings.DeviceHostMover, settings.DeviceCUDA))
	}
	return errors.Join(bad...)
}

// dealTurns returns the engine of each request. A request that repeats more than a shared first
// block of an earlier one is a later turn of its conversation, and goes to the next engine after
// that of the earlier turn, so it can find only what another engine saved. Other requests rotate.
func dealTurns(records []mockengine.Record, engines int) []int {
	last := make(map[uint64]int) // engine that had a block last
	deal := make([]int, len(records))
	next := 0
	for i, rec := range records {
		to := -1
		for k := len(rec.HashIDs) - 1; k >= 1; k-- {
			if e, ok := last[rec.HashIDs[k]]; ok {
				to = (e + 1) % engines
				break
			}
		}
		if to < 0 {
			to = next
			next = (next + 1) % engines
		}
		deal[i] = to
		for _, id := range rec.HashIDs {
			last[id] = to
		}
	}
	return deal
}

// requestFor returns the request of a record. Prompts are padded to whole blocks, so that a prompt
// is len(hash_ids) blocks and figures can be compared with those published for the trace.
func (s *scenario) requestFor(rng *rand.Rand, id uint64, rec *mockengine.Record) mockengine.Request {
	q := mockengine.Request{ID: id, At: rec.Timestamp, Prompt: rec.HashIDs, Output: rec.OutputLength}
	if rng.Float64() < float64(s.abortRate) {
		q.Abort = mockengine.Abort{When: mockengine.When(1 + rng.IntN(4)), Output: rng.IntN(rec.OutputLength + 1)}
	}
	return q
}

// engineConfig returns the configuration that all engines share.
func (s *scenario) engineConfig(records []mockengine.Record) (mockengine.Config, error) {
	c := mockengine.Config{
		Name: "engine", Model: "mock/replay", Seed: s.seed, Ranks: s.ranks, Groups: s.groups,
		Blocks: max(s.engineBlocks, 1), BlockBytes: int(s.blockBytes),
		KernelLag: s.kernelLag, LookupTimeout: s.lookupTimeout,
	}
	if err := c.Validate(); err != nil {
		return c, err
	}
	most := 0
	for i := range records {
		tokens := len(records[i].HashIDs)*mockengine.TraceBlock + records[i].OutputLength + mockengine.SpareTokens
		most = max(most, c.BlocksFor(tokens))
	}
	if s.engineBlocks == 0 {
		c.Blocks = max(2000, most)
		if s.engines >= 8 {
			c.Blocks = max(512, most)
		}
	}
	if c.Blocks < most {
		return c, fmt.Errorf("engine-blocks: %d, allowed: %d and more, which the largest request needs", c.Blocks, most)
	}
	return c, nil
}

// Sizes of a pool that holds everything: a margin for slabs that are not full, and room for
// answers.
const (
	poolMargin = 1.25
	poolLeast  = 128 << 20 // bytes
)

// poolSize returns the configured size of the pool, or one that holds all blocks of the trace and
// of the answers.
func (s *scenario) poolSize(c *mockengine.Config, records []mockengine.Record) int64 {
	if s.pool > 0 {
		return s.pool
	}
	unique := make(map[uint64]struct{})
	answers := 0
	for i := range records {
		for _, id := range records[i].HashIDs {
			unique[id] = struct{}{}
		}
		answers += records[i].OutputLength/mockengine.TraceBlock + 1
	}
	blocks := float64(c.BlocksFor((len(unique) + answers) * mockengine.TraceBlock))
	return int64(blocks*float64(s.blockBytes)*float64(s.ranks)*poolMargin) + poolLeast
}

// poolBlocks returns the capacity of the pool in hash blocks, for the simulation; 0 is no limit.
// capacity is that of an agent that runs already.
func (s *scenario) poolBlocks(c *mockengine.Config, capacity int64) int {
	if capacity == 0 {
		capacity = s.pool
	}
	perHash := float64(c.BlocksFor(64*mockengine.TraceBlock)) / 64
	return int(float64(capacity) / (perHash * float64(s.blockBytes) * float64(s.ranks)))
}
