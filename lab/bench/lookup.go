package bench

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
)

// lookupRow is one line of the result: round trips of one form.
type lookupRow struct {
	Hashes int     `json:"hashes"`
	Ranks  int     `json:"ranks"`
	P50us  float64 `json:"p50_us"`
	P99us  float64 `json:"p99_us"`
}

type lookupSettings struct {
	blocks int    // stored
	rounds int    // questions of each kind
	agent  string // lookupVirtual or another one
}

const wideRanks = 8

var lookupHashes = []int{1, 128, 2048}

func lookupCommand() *cobra.Command {
	asJSON, s := false, lookupSettings{blocks: 1 << 20, rounds: 1000, agent: lookupVirtual}
	cmd := &cobra.Command{
		Use:   "lookup",
		Short: "Time look-ups",
		Long: `Runs an agent, in a process of its own, whose pool holds 1,048,576 blocks (their data is address
space only), and asks it for random runs of them: all are hits. With one rank a look-up reserves what it finds, which
is released outside of the measurement. Takes about 20 seconds.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rows, err := measureLookup(&s)
			if err != nil {
				return err
			}
			return printLookup(cmd.OutOrStdout(), rows, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.AddCommand(lookupAgentCommand())
	return cmd
}

func measureLookup(s *lookupSettings) (rows []lookupRow, err error) {
	for _, ranks := range []int{1, wideRanks} {
		more, err := measureLookupRanks(s, ranks)
		if err != nil {
			return nil, fmt.Errorf("%d ranks: %w", ranks, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// measureLookupRanks measures an engine of so many ranks.
func measureLookupRanks(s *lookupSettings, ranks int) (rows []lookupRow, err error) {
	b, err := newLookupBench(s, ranks)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, n := range lookupHashes {
		row, err := b.measure(n, s.rounds)
		if err != nil {
			return nil, fmt.Errorf("%d hashes: %w", n, err)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func printLookup(out io.Writer, rows []lookupRow, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(map[string]any{"rows": rows})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, "ranks\thashes\tp50 us\tp99 us\t")
	for _, r := range rows {
		_, _ = fmt.Fprintf(w, "%d\t%d\t%.0f\t%.0f\t\n", r.Ranks, r.Hashes, r.P50us, r.P99us)
	}
	return w.Flush()
}

// lookupAgent is the agent that is asked, in a process of its own: the other end of a socket has
// its own threads and garbage collector, as in production.
type lookupAgent struct {
	pool   *dram.Pool
	device *host.Device
	agent  *agent.Agent
}

const (
	lookupSockets = "s"       // the agent's socket directory, in the measurement's
	lookupReal    = "real"    // the pool has memory, to be saved to
	lookupVirtual = "virtual" // it is address space only
	lookupForgets = "forgets" // the same, and the agent remembers nothing of look-ups

	savePoolBytes = 512 << 20 // what a pool with memory has beyond the stored blocks
)

// lookupAgentCommand is the process that only bench lookup starts.
func lookupAgentCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "agent DIR CHAINS RANKS " + lookupReal + "|" + lookupVirtual + "|" + lookupForgets,
		Hidden: true, Args: cobra.ExactArgs(4),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			chains, errChains := strconv.Atoi(args[1])
			ranks, errRanks := strconv.Atoi(args[2])
			if err := errors.Join(errChains, errRanks); err != nil {
				return settings.Invalid(err)
			}
			a := &lookupAgent{}
			defer func() { err = errors.Join(err, a.close()) }()
			if err := a.open(filepath.Join(args[0], lookupSockets), chains, ranks, args[3]); err != nil {
				return err
			}
			return serveParent(cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}

func (a *lookupAgent) open(dir string, chains, ranks int, kind string) (err error) {
	memory, join := kind == lookupReal, guests.Options{}
	if kind != lookupForgets {
		join.History = history.New()
	}
	blocks := int64(chains * lookupChain)
	size := (blocks+blocks/8)*int64(ranks)*lookupShardBytes + 64<<20
	if memory {
		size += savePoolBytes
	}
	if a.pool, err = dram.Open(dram.Options{Bytes: size, Virtual: !memory,
		Advisor: advisor.New(evict.Named(evict.DefaultName), nil)}); err != nil {
		return err
	}
	if memory {
		if err := a.pool.Populated(); err != nil {
			return err
		}
	}
	arena, _ := a.pool.Arena()
	a.device = host.Open(arena)
	if a.agent, err = agent.New(agent.Config{Dir: dir}, a.pool, a.device, zap.NewNop()); err != nil {
		return err
	}
	a.agent.Plug(guests.Join(a.agent, a.pool, join, zap.NewNop()))
	if err := a.agent.Start(); err != nil {
		return err
	}
	return a.fill(chains, ranks)
}

// fill stores chains in the engine's space without their data.
func (a *lookupAgent) fill(chains, ranks int) error {
	r := lookupRegistration(ranks)
	space, err := a.pool.OpenSpace(pool.Spec{
		Fingerprint: r.Space(), Identity: r.AppendIdentity(nil), Shards: ranks,
		Groups: []pool.Group{{BlockTokens: lookupBlockTokens,
			ShardBytes: slices.Repeat([]uint32{lookupShardBytes}, ranks)}},
	})
	if err != nil {
		return err
	}
	for chain := range chains {
		b := pool.Batch{Space: space, Epoch: 1, Hashes: benchChain(nil, chain, lookupChain),
			Status: make([]pool.Status, lookupChain), Slots: make([]pool.Slot, lookupChain)}
		for rank := range ranks {
			b.Shard = uint8(rank)
			a.pool.Reserve(&b)
			if i := slices.IndexFunc(b.Status, func(s pool.Status) bool { return s != pool.OK }); i >= 0 {
				return fmt.Errorf("block %d of chain %d: status %d", i, chain, b.Status[i])
			}
			a.pool.Commit(b.Slots, 1, b.Status)
		}
	}
	return nil
}

// benchChain appends the hashes of a chain to blob: pseudo-random bytes.
func benchChain(blob []byte, number, n int) pool.Hashes {
	r := rand.New(rand.NewPCG(uint64(number), 0x6b76))
	for range n * pool.MaxHashLen / 8 {
		blob = binary.LittleEndian.AppendUint64(blob, r.Uint64())
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

func (a *lookupAgent) close() (err error) {
	if a.agent != nil {
		a.agent.Close()
	}
	if a.device != nil {
		err = a.device.Close()
	}
	if a.pool != nil {
		err = errors.Join(err, a.pool.Close())
	}
	return err
}

// lookupRegistration returns the registration of the scheduler of the engine that asks.
func lookupRegistration(ranks int) *ipc.Register {
	return &ipc.Register{
		Req: 1, Instance: "bench", World: uint32(ranks), Shards: uint32(ranks), HashTokens: lookupBlockTokens,
		LookupName: lookupName,
		Identity: []ipc.Pair{{Key: "dtype", Value: "bfloat16"}, {Key: "model", Value: "bench"},
			{Key: "tenant", Value: ""}},
		Groups: []ipc.GroupDesc{{BlockTokens: lookupBlockTokens, NumBlocks: lookupEngineBytes / lookupShardBytes}},
	}
}

// newMemory returns a memfd of that many bytes.
func newMemory(size int64) (fd int, err error) {
	if fd, err = unix.MemfdCreate("kvagent-bench", unix.MFD_CLOEXEC); err != nil {
		return -1, fmt.Errorf("memfd: %w", err)
	}
	if err = unix.Ftruncate(fd, size); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("memfd: %w", err)
	}
	return fd, nil
}
