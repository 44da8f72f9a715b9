package bench

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/crc32c"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/transfer"
)

// transferRow is one line of the result: the path from engine memory to the pool or back compared
// with plain copy().
type transferRow struct {
	Direction    string  `json:"direction"` // save, load, both; sum: one core sums what a load reads
	SegmentBytes int     `json:"segment_bytes"`
	GBps         float64 `json:"gbps"`      // 10^9 bytes per second, median
	CopyGBps     float64 `json:"copy_gbps"` // the same bytes by copy(), with as many threads
	Ratio        float64 `json:"ratio"`     // median of the ratios of neighbouring measurements
}

type transferSettings struct {
	json   bool
	rounds int
	memory int64 // bytes of engine memory, and of the pool
}

func transferCommand() *cobra.Command {
	s := transferSettings{rounds: 9, memory: 1 << 30}
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "Compare saves and loads on the host device with plain copy()",
		Long: `Moves scattered blocks between an engine's memory and a pool, with checksums, and, alternating with
that, the same bytes between the same places by copy() with as many threads. Takes about 10 seconds
and three times --memory bytes of memory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rows, err := measureTransfer(&s)
			if err != nil {
				return err
			}
			return printTransfer(cmd.OutOrStdout(), rows, s.json)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	f.Var(settings.Count(&s.rounds, 1, 1000), "rounds", "measurements of each kind, of which the median counts")
	f.Var(settings.Size(&s.memory, 128<<20, 1<<40), "memory", "bytes of engine memory, and of the pool")
	return cmd
}

func measureTransfer(s *transferSettings) (rows []transferRow, err error) {
	b, err := newTransferBench(s.memory)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, segment := range []int{4 << 10, 32 << 10, 256 << 10} {
		more, err := b.measure(segment, s.rounds)
		if err != nil {
			return nil, fmt.Errorf("segments of %d bytes: %w", segment, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func printTransfer(out io.Writer, rows []transferRow, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(map[string]any{"rows": rows})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, "segment\tdirection\tGB/s\tcopy() GB/s\tratio\t")
	for _, r := range rows {
		_, _ = fmt.Fprintf(w, "%d KiB\t%s\t%.2f\t%.2f\t%.2f\t\n", r.SegmentBytes>>10, r.Direction, r.GBps, r.CopyGBps,
			r.Ratio)
	}
	return w.Flush()
}

// Sizes of the measurement.
const (
	jobSegments = 8        // of a block; each in a layer of its own, as a paged KV cache has them
	jobShare    = 8        // one measurement moves 1/jobShare of the engine's memory
	jobBlocks   = 256      // blocks of one job
	sumPiece    = 64 << 10 // bytes that a mover sums at a time
)

// transferBench is an engine, a pool, and for each segment size a worker between them.
type transferBench struct {
	segment, blocks int // of the worker at hand
	engine          *engine.Host
	memory          *engine.HostMemory // the engine's KV cache
	other           *engine.HostMemory // source and target of copy(): as large as the pool's arena
	pool            *dram.Pool
	host            *host.Device
	peer            cudaipc.Peer
	worker          *transfer.Worker
	done            chan transfer.Completion
	chains          int    // hash chains so far
	jobs            uint64 // jobs so far
	random          *rand.Rand
}

func newTransferBench(memory int64) (*transferBench, error) {
	b := &transferBench{done: make(chan transfer.Completion, 1<<16), random: rand.New(rand.NewPCG(1, 2))}
	if err := b.open(memory); err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

func (b *transferBench) open(memory int64) (err error) {
	if b.engine, err = engine.NewHost(1, 1); err != nil {
		return err
	}
	if b.memory, err = b.engine.Alloc(0, memory); err != nil {
		return err
	}
	if b.other, err = b.engine.Alloc(1, memory); err != nil {
		return err
	}
	if b.pool, err = dram.Open(dram.Options{Bytes: memory, HugePages: dram.Off}); err != nil {
		return err
	}
	if err := b.pool.Populated(); err != nil {
		return err
	}
	arena, _ := b.pool.Arena()
	b.host = host.Open(arena)
	region, err := b.memory.Region().Dup()
	if err != nil {
		return err
	}
	words, sync := b.engine.SyncDesc()
	if words, err = words.Dup(); err != nil {
		return err
	}
	b.peer, err = b.host.Import(cudaipc.Import{Regions: []cudaipc.Region{region, words}, Sync: &sync})
	return err
}

// start starts a worker for segments of one size, in a space of its own.
func (b *transferBench) start(segment int) error {
	b.segment, b.blocks = segment, len(b.memory.Mem)/(segment*jobSegments)
	spec := pool.Spec{
		Fingerprint: pool.Fingerprint{byte(segment >> 12)}, Identity: []byte("bench"), Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{uint32(b.segment * jobSegments)}}},
	}
	space, err := b.pool.OpenSpace(spec)
	if err != nil {
		return err
	}
	group := transfer.GroupLayout{NumBlocks: uint32(b.blocks)}
	for i := range jobSegments {
		group.Segments = append(group.Segments, transfer.Segment{
			Offset: uint64(i * b.blocks * b.segment), Stride: uint64(b.segment), Bytes: uint32(b.segment),
		})
	}
	b.worker, err = transfer.Start(transfer.Config{
		Peer: b.peer, Slots: b.pool, Space: space, Spec: spec,
		Held:      []transfer.Held{{Layout: transfer.Layout{Groups: []transfer.GroupLayout{group}}}},
		Integrity: transfer.Full,
		Complete:  func(c transfer.Completion) { b.done <- c },
	})
	return err
}

func (b *transferBench) close() error {
	var errs []error
	if b.peer != nil {
		errs = append(errs, b.peer.Close())
	}
	if b.host != nil {
		errs = append(errs, b.host.Close())
	}
	if b.pool != nil {
		errs = append(errs, b.pool.Close())
	}
	if b.engine != nil {
		errs = append(errs, b.engine.Close())
	}
	return errors.Join(errs...)
}

// measure moves everything once in both directions, so that every page is there, and then measures
// in turns.
func (b *transferBench) measure(segment, rounds int) ([]transferRow, error) {
	if err := b.start(segment); err != nil {
		return nil, err
	}
	defer b.worker.Close()
	b.copies(b.blocks, cudaipc.Gather)
	b.copies(b.blocks, cudaipc.Scatter)
	share := b.blocks / jobShare
	for range jobShare {
		if _, err := b.move(share, true, false); err != nil {
			return nil, err
		}
		if _, err := b.move(share, false, true); err != nil {
			return nil, err
		}
	}
	var rows []transferRow
	for _, d := range []struct {
		name       string
		save, load bool // of the reference
		do         func() (float64, error)
	}{
		{"save", true, false, func() (float64, error) { return b.move(share, true, false) }},
		{"load", false, true, func() (float64, error) { return b.move(share, false, true) }},
		{"both", true, true, func() (float64, error) { return b.move(share, true, true) }},
		{"sum", false, true, func() (float64, error) { return b.sum(share), nil }},
	} {
		row := transferRow{Direction: d.name, SegmentBytes: b.segment}
		var path, plain, ratio []float64
		for range rounds {
			reference := b.reference(share, d.save, d.load)
			speed, err := d.do()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", d.name, err)
			}
			path, plain, ratio = append(path, speed), append(plain, reference), append(ratio, speed/reference)
		}
		row.GBps, row.CopyGBps, row.Ratio = rounded(median(path)), rounded(median(plain)), rounded(median(ratio))
		rows = append(rows, row)
	}
	return rows, nil
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

func rounded(v float64) float64 { return math.Round(v*1000) / 1000 }

// reference moves blocks by copy(), each direction on a thread of its own, and gives 10^9 bytes per
// second.
func (b *transferBench) reference(blocks int, save, load bool) float64 {
	var threads sync.WaitGroup
	start, moved := time.Now(), 0
	for dir, on := range []bool{save, load} {
		if on {
			moved += blocks * jobSegments * b.segment
			threads.Go(func() { b.copies(blocks, cudaipc.Direction(dir)) })
		}
	}
	threads.Wait()
	return float64(moved) / time.Since(start).Seconds() / 1e9
}

// copies copies the same bytes as a transfer, with copy().
func (b *transferBench) copies(blocks int, dir cudaipc.Direction) {
	order := rand.New(rand.NewPCG(uint64(dir), 3)).Perm(b.blocks)
	engine, slots, block := b.memory.Mem, b.other.Mem, b.segment*jobSegments
	for i := range blocks {
		for s := range jobSegments {
			at := (s*b.blocks + order[i]) * b.segment
			slot := order[b.blocks-1-i]*block + s*b.segment
			if dir == cudaipc.Gather {
				copy(slots[slot:slot+b.segment], engine[at:at+b.segment])
			} else {
				copy(engine[at:at+b.segment], slots[slot:slot+b.segment])
			}
		}
	}
}

// sum sums as many blocks as a load reads, as a GPU's mover does: a block lies in one piece in the
// pool. It returns 10^9 bytes per second.
func (b *transferBench) sum(blocks int) float64 {
	order := rand.New(rand.NewPCG(uint64(cudaipc.Scatter), 3)).Perm(b.blocks)
	block := b.segment * jobSegments
	start, state := time.Now(), uint32(0)
	for i := range blocks {
		slot := order[b.blocks-1-i] * block
		for piece := range slices.Chunk(b.other.Mem[slot:slot+block], sumPiece) {
			state = crc32c.Update(state, piece)
		}
	}
	return float64(blocks*block) / time.Since(start).Seconds() / 1e9
}

// move saves a new chain of blocks, or loads the last one, or both at once, through the worker, and
// returns 10^9 bytes per second. Engine blocks are taken in random order.
func (b *transferBench) move(blocks int, save, load bool) (float64, error) {
	var jobs []transfer.Job
	if load {
		jobs = append(jobs, b.chain(transfer.Load, b.chains, blocks)...)
	}
	if save {
		b.chains++
		jobs = append(jobs, b.chain(transfer.Save, b.chains, blocks)...)
	}
	var want int64
	start := time.Now()
	for _, j := range jobs {
		if err := b.worker.Submit(j); err != nil {
			return 0, err
		}
		want += int64(len(j.Sections[0].Blocks)) * int64(b.segment*jobSegments)
	}
	var moved int64
	for range jobs {
		moved += (<-b.done).Bytes
	}
	took := time.Since(start)
	if moved != want {
		return 0, fmt.Errorf("%d bytes moved, want %d", moved, want)
	}
	return float64(moved) / took.Seconds() / 1e9, nil
}

// chain makes jobs of that many blocks; each is a prompt of its own.
func (b *transferBench) chain(kind transfer.Kind, chain, blocks int) []transfer.Job {
	order := b.random.Perm(b.blocks)
	hashes := make([]byte, blocks*pool.MaxHashLen)
	for i := range blocks {
		binary.LittleEndian.PutUint64(hashes[i*pool.MaxHashLen:], uint64(chain)<<32|uint64(i)+1)
	}
	var jobs []transfer.Job
	for from := 0; from < blocks; from += jobBlocks {
		to := min(from+jobBlocks, blocks)
		section := transfer.Section{Hashes: pool.Chain(hashes[from*pool.MaxHashLen:to*pool.MaxHashLen],
			pool.MaxHashLen)}
		for _, block := range order[from:to] {
			section.Blocks = append(section.Blocks, uint32(block))
		}
		b.jobs++
		jobs = append(jobs, transfer.Job{
			ID: b.jobs, Kind: kind, Epoch: 1, Event: cudaipc.None, Revoke: 0,
			Sections: []transfer.Section{section},
		})
	}
	return jobs
}
