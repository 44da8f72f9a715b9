// Package replay runs a recorded trace through agents and mock engines, and reports the outcome.
package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/transfer"
)

// defaultVerify samples more than serve does by default: a check could be wrong where engines are
// killed, or revoke their saves.
const defaultVerify = 10

// options has all settings of replay.
type options struct {
	trace    string
	requests int
	duration time.Duration
	pace     time.Duration
	seed     uint64

	engines, perProcess int
	engineBlocks        int // 0: enough for the largest request, at least 2,000, or 512 with many engines
	blockBytes          int64
	pool                int64 // 0: what the trace needs
	ranks, groups       int
	abortRate           float64
	lookupTimeout       time.Duration
	kernelLag           time.Duration

	kvagent   string // the program to start; empty: the one in this program's folder
	socket    string
	integrity string
	verify    int // one block in so many is checked end to end
	eviction  string
	device    string

	dramPath string
	tiers    []string // of each node
	nodes    int
	shared   string        // a tier of all nodes
	tiersIn  time.Duration // for all tiers to answer before the first request; 0: do not wait

	killEngine, killAgent, killMover, killHelper, killServer int // every this many requests
	pauseEngine, pauseAgent, pauseHelper, pauseServer        int
	pauseFor, serverDown                                     time.Duration
	server                                                   string        // command line of the shared tier's server
	stalledAfter                                             time.Duration // without a report of any engine
	flip                                                     bool

	json, progress bool
}

func defaultOptions() *options {
	return &options{
		perProcess: 1, nodes: 1, blockBytes: 16 << 10, ranks: 1, groups: 1, pauseFor: 10 * time.Second,
		serverDown: time.Second, stalledAfter: 3 * time.Minute,
		integrity: settings.IntegrityFull, verify: defaultVerify, eviction: evict.DefaultName,
		device:        settings.DeviceAuto,
		lookupTimeout: 100 * time.Millisecond,
	}
}

// Command returns the command replay.
func Command() *cobra.Command {
	s := defaultOptions()
	cmd := &cobra.Command{
		Use:   "replay --trace FILE",
		Short: "Replay a recorded trace through mock engines, with every byte checked",
		Long: `Replay starts an agent (the kvagent in this program's folder, or that of --kvagent) and mock engines
in processes of their own. It sends them the requests of a trace in Mooncake's format, in virtual
time: arrivals keep their order, and the trace runs as fast as the machine allows. Every block that
is loaded from the pool is compared byte for byte, and every block of a request again when it ends.

Turns of one conversation go to different engines, so that one engine hits what another one saved.
Engines, the agents of all nodes, their movers and helpers and the server of a shared tier can be
killed and paused at random moments, engines and agents preferably while a copy is in flight; then
requests are computed again and none may fail. Faults rotate over the nodes, from one that the seed
chooses.

A replay whose engines report nothing for --stalled-after fails and names what it waits for. SIGTERM
and SIGINT end it, and everything that it started, within 20 s.

It fails (exit code 1) if a byte was wrong, a request failed, or a lease or a mapping is left at the
end.`,
		Example: `  kvbench replay --trace conversation.jsonl --progress
  kvbench replay --trace conversation.jsonl --json --kill-engine-every 200 --kill-agent-every 1000 --seed 1`,
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := settings.Fill(cmd.Flags(), os.LookupEnv); err != nil {
				return settings.Invalid(err)
			}
			s.complete()
			return settings.Invalid(s.check())
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			defer endInTime(ctx, cmd.ErrOrStderr())()
			return run(ctx, s, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	s.addFlags(cmd.Flags())
	return cmd
}

func (s *options) addFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVar(&s.trace, "trace", "",
		"the trace: one JSON object a line, in any order, with timestamp, hash_ids and, optionally, "+
			"input_length and output_length")
	f.Var(settings.Count(&s.requests, 0, 1<<30), "requests", "replay only this many requests; 0 is all")
	f.Var(settings.Duration(&s.duration, 0, 24*time.Hour), "duration",
		"repeat the replay, with new prompts, for this long")
	f.Var(settings.Duration(&s.pace, 0, 24*time.Hour), "pace",
		"take at least this long, to be watched; 0 is as fast as possible")
	f.Uint64Var(&s.seed, "seed", 0, "seed of all random choices; 0 takes one from the clock and prints it")
	f.Var(settings.Count(&s.engines, 0, 1024), "engines", "engines; 0 is 2, or one for each node if there are more")
	f.Var(settings.Count(&s.perProcess, 1, 1024), "engines-per-process", "engines in one process")
	f.Var(settings.Count(&s.engineBlocks, 0, mockengine.MaxBlocks), "engine-blocks",
		"KV cache blocks of one engine; 0 is 2000, or 512 from 8 engines on, but enough for the largest request")
	f.Var(settings.Size(&s.blockBytes, 64, 1<<30), "block-bytes", "bytes of one block on one rank")
	f.Var(settings.Size(&s.pool, 0, dram.MaxBytes), "pool", "the agent's pool; 0 is as much as the trace fills")
	f.Var(settings.Count(&s.ranks, 1, mockengine.MaxRanks), "ranks", "tensor-parallel ranks of one engine")
	f.Var(settings.Count(&s.groups, 1, mockengine.MaxGroups), "groups",
		"KV cache groups; every second one has blocks of twice the tokens")
	f.Float64Var(&s.abortRate, "abort-rate", 0, "share of requests whose client disconnects, 0 to 1")
	f.Var(settings.Duration(&s.lookupTimeout, time.Millisecond, time.Minute), "lookup-timeout",
		"a look-up that takes longer is a miss")
	f.Var(settings.Duration(&s.kernelLag, 0, time.Second), "kernel-lag",
		"delay a step's kernels at random by up to this much")
	f.StringVar(&s.kvagent, "kvagent", "", "the kvagent to start; default: the one in this program's folder")
	f.StringVar(&s.socket, "socket", "",
		"socket directory, or session socket, of a running agent; default: start one")
	f.Var(settings.Choice(&s.integrity, []string{settings.IntegrityFull, settings.IntegrityHeader}), "integrity",
		"integrity of the agent that is started")
	f.Var(settings.Count(&s.verify, 0, transfer.MaxSampleEvery), "verify-sample",
		"verify-sample of the agent that is started; a mismatch fails the run")
	f.Var(settings.Choice(&s.eviction, evict.Names), "eviction", "eviction of the agent that is started")
	f.Var(settings.Choice(&s.device, settings.Devices), "device",
		"device of the agent that is started; with cuda the engines are on the only GPU too, every second one "+
			"in virtual memory")
	f.StringVar(&s.dramPath, "dram-path", "",
		"file on tmpfs or hugetlbfs for the pool of the agent that is started, so that the pool outlives kills")
	f.StringArrayVar(&s.tiers, "tier", nil,
		"a tier below the pool of the agent that is started, as for serve; may be given several times")
	f.Var(settings.Count(&s.nodes, 1, maxNodes), "nodes", "agents to start, each with a pool of its own; "+
		"engines are distributed over them")
	f.Var(settings.Duration(&s.tiersIn, 0, time.Hour), "tiers-within",
		"begin when every tier answers, and fail if one does not within this time; 0 does not wait")
	f.StringVar(&s.shared, "shared", "", "a tier of all nodes, below those of --tier, such as redis://127.0.0.1:6379")
	f.Var(settings.Count(&s.killEngine, 0, 1<<30), "kill-engine-every",
		"kill an engine every this many requests; 0 is never")
	f.Var(settings.Count(&s.killAgent, 0, 1<<30), "kill-agent-every", "kill an agent every this many requests, "+
		"rotating over the nodes; 0 is never")
	f.Var(settings.Count(&s.killMover, 0, 1<<30), "kill-mover-every", "kill a mover of an agent every this many "+
		"requests; 0 is never")
	f.Var(settings.Count(&s.killHelper, 0, 1<<30), "kill-helper-every",
		"kill an agent's helper (Mooncake's client) every this many requests; 0 is never")
	f.Var(settings.Count(&s.killServer, 0, 1<<30), "kill-server-every",
		"kill --server every this many requests, and start it again after --server-down; 0 is never")
	f.Var(settings.Count(&s.pauseEngine, 0, 1<<30), "pause-engine-every",
		"stop a process of engines for a while every this many requests; 0 is never")
	f.Var(settings.Count(&s.pauseAgent, 0, 1<<30), "pause-agent-every",
		"stop an agent for a while every this many requests, rotating over the nodes; 0 is never")
	f.Var(settings.Count(&s.pauseHelper, 0, 1<<30), "pause-helper-every",
		"stop an agent's helper for a while every this many requests; 0 is never")
	f.Var(settings.Count(&s.pauseServer, 0, 1<<30), "pause-server-every",
		"stop --server for a while every this many requests; 0 is never")
	f.Var(settings.Duration(&s.pauseFor, time.Millisecond, time.Hour), "pause-for",
		"how long a pause is")
	f.StringVar(&s.server, "server", "", "command line, split at blanks, of the server of --shared, which is "+
		"started before the agents and ended after them")
	f.Var(settings.Duration(&s.serverDown, 0, time.Hour), "server-down", "how long after a kill the server is "+
		"started again, unless all requests are over by then")
	f.Var(settings.Duration(&s.stalledAfter, time.Second, 24*time.Hour), "stalled-after",
		"fail when no engine has reported for this long, and name what is waited for; longer than --pause-for")
	f.BoolVar(&s.flip, "fault-flip-byte", false,
		"flip a byte of the pool in the end and load it; with --integrity header the run must fail")
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	f.BoolVar(&s.progress, "progress", false, "show how far it is")
}

// defaultEngines is the least number of engines by default.
const defaultEngines = 2

// complete sets the defaults that depend on other settings.
func (s *options) complete() {
	if s.engines == 0 {
		s.engines = max(defaultEngines, s.nodes)
	}
	if self, err := os.Executable(); err == nil && s.kvagent == "" {
		s.kvagent = filepath.Join(filepath.Dir(self), "kvagent")
	}
}

func (s *options) check() error {
	var bad []error
	if s.trace == "" {
		bad = append(bad, errors.New("trace must be given"))
	}
	if !(s.abortRate >= 0 && s.abortRate <= 1) {
		bad = append(bad, fmt.Errorf("abort-rate: %v, allowed: 0 to 1", s.abortRate))
	}
	if s.socket != "" && (s.killAgent+s.killMover+s.killHelper+s.pauseAgent+s.pauseHelper > 0 || s.flip) {
		bad = append(bad, errors.New("socket: an agent that was not started here is neither killed, paused nor "+
			"damaged, nor its movers and helpers"))
	}
	if _, err := exec.LookPath(s.kvagent); s.socket == "" && err != nil {
		bad = append(bad, fmt.Errorf("kvagent: %q, allowed: a program that can be run: %w", s.kvagent, err))
	}
	bad = append(bad, s.checkFaults())
	if s.killMover > 0 && (s.device == settings.DeviceAuto || s.device == settings.DeviceHost) {
		bad = append(bad, fmt.Errorf("device: %q has no mover, allowed with kill-mover-every: %s, %s", s.device,
			settings.DeviceHostMover, settings.DeviceCUDA))
	}
	if s.socket != "" && s.dramPath != "" {
		bad = append(bad, errors.New("dram-path: an agent that was not started here has its own"))
	}
	bad = append(bad, s.checkNodes())
	if s.flip && s.engines < 2 {
		bad = append(bad, fmt.Errorf("engines: %d, allowed: 2 and more with fault-flip-byte", s.engines))
	}
	return errors.Join(bad...)
}

// run is the whole run; the error is its verdict.
func run(ctx context.Context, s *options, out, log interface{ Write([]byte) (int, error) }) error {
	if s.seed == 0 {
		s.seed = uint64(time.Now().UnixNano())
	}
	records, err := mockengine.ReadTrace(s.trace, s.requests)
	if err != nil {
		return settings.Invalid(err)
	}
	if len(records) == 0 {
		return settings.Invalid(fmt.Errorf("%s: no requests", s.trace))
	}
	r, err := newReplay(s, records)
	if err != nil {
		return settings.Invalid(err)
	}
	r.show = newProgress(s, out, log)
	err = r.run(ctx)
	report := r.report()
	r.show.end(r, &report)
	if err != nil {
		return err
	}
	return report.verdict()
}

// Times in which a replay ends what it started.
const (
	EndsWithin    = 20 * time.Second // after SIGTERM or SIGINT everything has ended; the times below add up to less
	brokenWithin  = 8 * time.Second  // for agents to end by themselves when the run is aborted
	enginesWithin = 10 * time.Second // for processes of engines that have left to end
)

// endInTime ends this process if it has not ended EndsWithin after ctx is done; the kernel kills
// its children with it. The caller calls disarm when everything has ended.
func endInTime(ctx context.Context, log io.Writer) (disarm func()) {
	over := make(chan struct{})
	go func() {
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		timer := time.NewTimer(EndsWithin)
		defer timer.Stop()
		select {
		case <-over:
		case <-timer.C:
			fmt.Fprintf(log, "replay: not over %v after its end was requested: killed\n", EndsWithin)
			os.Exit(1)
		}
	}()
	return func() { close(over) }
}
