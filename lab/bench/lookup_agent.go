package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
)

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
	memory, cfg := kind == lookupReal, agent.Config{Dir: dir}
	if kind != lookupForgets {
		cfg.History = history.New()
	}
	blocks := int64(chains * lookupChain)
	size := (blocks+blocks/8)*int64(ranks)*lookupShardBytes + 64<<20
	if memory {
		size += savePoolBytes
	}
	if a.pool, err = dram.Open(dram.Options{Bytes: size, Virtual: !memory,
		Policy: evict.Named(evict.DefaultName)}); err != nil {
		return err
	}
	if memory {
		if err := a.pool.Populated(); err != nil {
			return err
		}
	}
	if err := a.openDevice(memory); err != nil {
		return err
	}
	if a.agent, err = agent.New(cfg, a.pool, a.device, zap.NewNop()); err != nil {
		return err
	}
	if err := a.agent.Start(); err != nil {
		return err
	}
	return a.fill(chains, ranks)
}

// openDevice opens a device on the pool's arena, or on one that no copy touches.
func (a *lookupAgent) openDevice(memory bool) (err error) {
	if memory {
		_, fd := a.pool.Arena()
		a.device, err = host.Open(host.Options{ArenaFD: fd, ArenaSize: a.pool.Info().Bytes})
		return err
	}
	fd, err := newMemory(lookupEngineBytes)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	a.device, err = host.Open(host.Options{ArenaFD: fd, ArenaSize: lookupEngineBytes})
	return err
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
		err = a.device.Close(cudaipc.AllPeers)
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
