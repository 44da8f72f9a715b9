package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// Sizes of the measurement.
const (
	lookupChain       = 2048 // blocks of a stored chain
	lookupBlockTokens = 16
	lookupShardBytes  = 1024
	lookupEngineBytes = 1 << 20 // of each rank's memory, and of the arena that no copy touches
	lookupName        = "bench"
)

// lookupBench is an agent with one engine of some ranks, a filled pool, and the server to compare with.
type lookupBench struct {
	ranks, chains int
	dir           string
	pool          *dram.Pool
	device        *cudaipc.Host
	agent         *agent.Agent
	scheduler     *ipc.Conn
	session       uint64
	workers       []*ipc.Conn
	registration  *ipc.Register
	zmq           *ipc.Context
	client        *ipc.LookupClient
	echo          *echoServer
	echoClient    *ipc.LookupClient
	random        *rand.Rand
}

func newLookupBench(blocks, ranks int) (*lookupBench, error) {
	b := &lookupBench{ranks: ranks, chains: (blocks + lookupChain - 1) / lookupChain, random: rand.New(rand.NewPCG(1, 2))}
	if err := b.open(); err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

func (b *lookupBench) open() (err error) {
	if b.dir, err = os.MkdirTemp("", "kvagent"); err != nil {
		return err
	}
	blocks := int64(b.chains * lookupChain)
	if b.pool, err = dram.Open(dram.Options{Bytes: (blocks+blocks/8)*int64(b.ranks)*lookupShardBytes + 64<<20, Virtual: true, Policy: newPolicy(defaultEviction)}); err != nil {
		return err
	}
	if err := b.openAgent(); err != nil {
		return err
	}
	if err := b.register(); err != nil {
		return err
	}
	if err := b.fill(); err != nil {
		return err
	}
	return b.connect()
}

func (b *lookupBench) openAgent() error {
	fd, err := benchMemory()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if b.device, err = cudaipc.OpenHost(cudaipc.HostOptions{ArenaFD: fd, ArenaSize: lookupEngineBytes}); err != nil {
		return err
	}
	a, err := agent.New(agent.Config{Dir: filepath.Join(b.dir, "s")}, b.pool, b.device, zap.NewNop())
	if err != nil {
		return err
	}
	b.agent = a
	return a.Start()
}

func benchMemory() (fd int, err error) {
	if fd, err = unix.MemfdCreate("kvagent-bench", unix.MFD_CLOEXEC); err != nil {
		return -1, fmt.Errorf("memfd: %w", err)
	}
	if err = unix.Ftruncate(fd, lookupEngineBytes); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("memfd: %w", err)
	}
	return fd, nil
}

// register announces the engine: its scheduler, which opens the look-up socket, and all its ranks.
func (b *lookupBench) register() error {
	b.registration = &ipc.Register{
		Req: 1, Instance: "bench", World: uint32(b.ranks), Shards: uint32(b.ranks), HashTokens: lookupBlockTokens, LookupName: lookupName,
		Identity: []ipc.Pair{{Key: "dtype", Value: "bfloat16"}, {Key: "model", Value: "bench"}, {Key: "tenant", Value: ""}},
		Groups:   []ipc.GroupDesc{{BlockTokens: lookupBlockTokens, NumBlocks: lookupEngineBytes / lookupShardBytes}},
	}
	var err error
	if b.scheduler, err = b.openSession(b.registration, nil); err != nil {
		return fmt.Errorf("scheduler: %w", err)
	}
	for rank := range uint32(b.ranks) {
		worker := *b.registration
		worker.Role, worker.Rank, worker.Shard, worker.LookupName = ipc.RoleWorker, rank, rank, ""
		worker.Regions, worker.Segments = 1, 1
		c, err := b.openSession(&worker, []any{
			&ipc.Regions{Req: 1, List: []ipc.RegionDesc{{Kind: ipc.RegionFD, Size: lookupEngineBytes}}},
			&ipc.Segments{Req: 1, List: []ipc.SegmentDesc{{Stride: lookupShardBytes, Bytes: lookupShardBytes}}},
		})
		if err != nil {
			return fmt.Errorf("rank %d: %w", rank, err)
		}
		b.workers = append(b.workers, c)
	}
	return nil
}

// openSession opens a session and registers it.
func (b *lookupBench) openSession(r *ipc.Register, parts []any) (*ipc.Conn, error) {
	c, w, err := ipc.DialSession(context.Background(), filepath.Join(b.dir, "s", ipc.SessionSocket), "kvagent bench", ipc.Version, ipc.Version)
	if err != nil {
		return nil, err
	}
	if r.Role == ipc.RoleScheduler {
		b.session = w.Session
	}
	if err := registerBench(c, r, parts); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func registerBench(c *ipc.Conn, r *ipc.Register, parts []any) error {
	if err := c.Send(r); err != nil {
		return err
	}
	for _, p := range parts {
		if err := sendPart(c, p); err != nil {
			return err
		}
	}
	for {
		m, _, err := c.Recv()
		if err != nil {
			return err
		}
		if a, ok := m.(*ipc.Registered); ok {
			if a.Status != ipc.RegDone {
				return fmt.Errorf("refused: %s", a.Text)
			}
			return nil
		}
	}
}

func sendPart(c *ipc.Conn, part any) error {
	if _, ok := part.(*ipc.Regions); !ok {
		return c.Send(part)
	}
	fd, err := benchMemory()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return c.Send(part, fd)
}

// fill stores chains in the engine's space without their data.
func (b *lookupBench) fill() error {
	sizes := slices.Repeat([]uint32{lookupShardBytes}, b.ranks)
	space, err := b.pool.OpenSpace(pool.Spec{
		Fingerprint: b.registration.Space(), Identity: b.registration.AppendIdentity(nil), Shards: b.ranks,
		Groups: []pool.Group{{BlockTokens: lookupBlockTokens, ShardBytes: sizes}},
	})
	if err != nil {
		return err
	}
	f := filledIndex{pool: b.pool, space: space, shards: b.ranks}
	for chain := range b.chains {
		if err := f.insert(chain, lookupChain); err != nil {
			return err
		}
	}
	return nil
}

func (b *lookupBench) connect() (err error) {
	if b.zmq, err = ipc.NewContext(); err != nil {
		return err
	}
	if b.echo, err = newEchoServer(filepath.Join(b.dir, "echo")); err != nil {
		return err
	}
	b.client = b.zmq.DialLookup(filepath.Join(b.dir, "s", lookupName))
	b.echoClient = b.zmq.DialLookup(b.echo.path)
	return nil
}

func (b *lookupBench) close() (err error) {
	if b.zmq != nil {
		err = b.zmq.Close()
	}
	if b.echo != nil {
		err = errors.Join(err, b.echo.close())
	}
	for _, c := range append(b.workers, b.scheduler) {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	if b.agent != nil {
		b.agent.Close()
	}
	if b.device != nil {
		err = errors.Join(err, b.device.Close(cudaipc.AllPeers))
	}
	if b.pool != nil {
		err = errors.Join(err, b.pool.Close())
	}
	return errors.Join(err, os.RemoveAll(b.dir))
}
