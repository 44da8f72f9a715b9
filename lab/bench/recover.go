package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
)

// recoverReport describes what was recovered of a pool whose process was killed while it saved.
type recoverReport struct {
	Slots          int     `json:"slots"`
	Recovered      int     `json:"recovered"`
	RecoveredRatio float64 `json:"recovered_ratio"` // of the slots, all of which were in use
	RecoverS       float64 `json:"recover_s"`       // from the open call until the pool can be used
	FillS          float64 `json:"fill_s"`          // of the process that was killed
	Checked        int     `json:"blocks_checked"`  // a sample, compared byte for byte
	Wrong          int     `json:"blocks_wrong"`
}

const (
	defaultRecoverSlots = 1_000_000
	minRecoverSlots     = 10_000
	maxRecoverSlots     = 100_000_000
	recoverSlotBytes    = 1 << 10
	recoverSlab         = 1 << 20
	recoverChain        = 128 // blocks of a chain
	recoverGoOn         = 100 // chains saved after the pool is full, before the kill
	recoverChecked      = 512 // chains compared
)

func recoverCommand() *cobra.Command {
	var asJSON bool
	slots, dir := defaultRecoverSlots, "/dev/shm"
	cmd := &cobra.Command{
		Use:   "recover",
		Short: "Measure how much of a killed agent's pool is recovered, and how fast",
		Long: fmt.Sprintf(`Fills a pool in a file with blocks of %d bytes in a process of its own, kills that
process while it saves more, opens the file, and compares a sample of the blocks byte for byte.`, recoverSlotBytes),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if slots < minRecoverSlots || slots > maxRecoverSlots {
				return settings.Invalid(fmt.Errorf("slots: %d, allowed: %d to %d", slots, minRecoverSlots,
					maxRecoverSlots))
			}
			report, err := measureRecover(slots, dir)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%d of %d blocks (%.2f %%) came back in %.3f s; %d compared, %d wrong\n",
				report.Recovered, report.Slots, 100*report.RecoveredRatio, report.RecoverS, report.Checked,
				report.Wrong)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().IntVar(&slots, "slots", slots, fmt.Sprintf(
		"blocks that the pool holds, %d to %d; it takes 1.1 KiB for each", minRecoverSlots, maxRecoverSlots))
	cmd.Flags().StringVar(&dir, "dir", dir, "directory on tmpfs or hugetlbfs for the file, which is removed in the end")
	cmd.AddCommand(recoverFillCommand())
	return cmd
}

func measureRecover(slots int, dir string) (r recoverReport, err error) {
	dir, err = os.MkdirTemp(dir, "kvagent-recover-")
	if err != nil {
		return r, fmt.Errorf("dir: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // tmpfs: it fails only if another process removed it
	path := filepath.Join(dir, "pool")
	chains, took, err := fillAndKill(path, slots)
	if err != nil {
		return r, err
	}
	p, err := dram.Open(recoverOptions(path, slots))
	if err != nil {
		return r, err
	}
	defer p.Close()
	found := p.Info().Recovery
	if found.Cold != "" || found.New {
		return r, fmt.Errorf("%s: nothing came back: %s", path, found.Cold)
	}
	slots = int(p.Info().Bytes / recoverSlotBytes) // rounded up to slabs
	r = recoverReport{
		Slots: slots, Recovered: found.Entries, RecoveredRatio: float64(found.Entries) / float64(slots),
		RecoverS: found.Took.Seconds(), FillS: took.Seconds(),
	}
	r.Checked, r.Wrong, err = checkRecovered(p, chains)
	if err == nil && r.Wrong > 0 {
		err = fmt.Errorf("%d of %d blocks have wrong bytes", r.Wrong, r.Checked)
	}
	return r, err
}

// recoverOptions returns the options of a pool of that many slots, at most a slab more.
func recoverOptions(path string, slots int) dram.Options {
	bytes := int64(slots) * recoverSlotBytes
	return dram.Options{Bytes: (bytes + recoverSlab - 1) / recoverSlab * recoverSlab, SlabBytes: recoverSlab,
		Path: path, Policy: evict.Named(evict.DefaultName)}
}

func recoverSpec() pool.Spec {
	return pool.Spec{Identity: []byte("bench recover"), Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{recoverSlotBytes}}}}
}

// recoverFull returns the chains that fill a pool of that many slots.
func recoverFull(slots int) int { return slots/recoverChain + 2 }

// recoverFillCommand is the process that is killed. When the pool is full it saves as many chains
// as a line of its input says.
func recoverFillCommand() *cobra.Command {
	return &cobra.Command{
		Use: "fill PATH SLOTS", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			slots, err := strconv.Atoi(args[1])
			if err != nil {
				return settings.Invalid(err)
			}
			p, err := dram.Open(recoverOptions(args[0], slots))
			if err != nil {
				return err
			}
			id, err := p.OpenSpace(recoverSpec())
			if err != nil {
				return err
			}
			saved := 0
			save := func(chains int) {
				for range chains {
					saveRecoverChain(p, id, saved)
					saved++
				}
			}
			save(recoverFull(slots))
			return serveParent(cmd.InOrStdin(), cmd.OutOrStdout(), func(line string) error {
				chains, err := strconv.Atoi(line)
				save(chains)
				return err
			})
		},
	}
}

// fillAndKill runs that process, and kills it while it saves into the full pool. It returns how
// many chains were saved, at least, and the time until the pool was full.
func fillAndKill(path string, slots int) (chains int, took time.Duration, err error) {
	began := time.Now()
	c, err := startChildProcess("bench", "recover", "fill", path, strconv.Itoa(slots))
	if err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	// It begins the second line when it has answered the first, and never ends it.
	_, err = fmt.Fprintf(c.in, "%d\n%d\n", recoverGoOn, maxRecoverSlots)
	if err == nil {
		err = c.await()
	}
	err = errors.Join(err, c.cmd.Process.Kill())
	_ = c.close() // it was killed
	return recoverFull(slots) + recoverGoOn, took, err
}

// recoverBytes fills a block with its hash, repeatedly.
func recoverBytes(b, hash []byte) {
	for n := 0; n < len(b); {
		n += copy(b[n:], hash)
	}
}

func recoverBatch(id pool.SpaceID, chain int) pool.Batch {
	return pool.Batch{Space: id, Epoch: 1, Hashes: benchChain(nil, chain, recoverChain),
		Status: make([]pool.Status, recoverChain), Slots: make([]pool.Slot, recoverChain)}
}

func saveRecoverChain(p *dram.Pool, id pool.SpaceID, chain int) {
	b := recoverBatch(id, chain)
	p.Reserve(&b)
	arena, _ := p.Arena()
	for i, slot := range b.Slots {
		if b.Status[i] == pool.OK {
			hash := b.Hashes.At(i)
			recoverBytes(arena[slot.Off:][:slot.Len], hash)
			k := pool.Key{Hash: pool.MakeHash(hash)}
			b.Slots[i].Sum = pool.Sum(k.Seed(slot.Len), arena[slot.Off:][:slot.Len])
		}
	}
	p.Commit(b.Slots, b.Epoch, b.Status)
}

// checkRecovered compares chains that were saved last, as far as they are stored.
func checkRecovered(p *dram.Pool, chains int) (checked, wrong int, err error) {
	id, err := p.OpenSpace(recoverSpec())
	if err != nil {
		return 0, 0, err
	}
	arena, _ := p.Arena()
	want := make([]byte, recoverSlotBytes)
	for chain := max(0, chains-recoverChecked); chain < chains; chain++ {
		b := recoverBatch(id, chain)
		p.Acquire(&b)
		for i, slot := range b.Slots {
			if b.Status[i] != pool.OK {
				continue
			}
			checked++
			recoverBytes(want, b.Hashes.At(i))
			if !bytes.Equal(want, arena[slot.Off:][:slot.Len]) {
				wrong++
			}
		}
		p.Release(b.Slots, b.Status)
	}
	return checked, wrong, nil
}
