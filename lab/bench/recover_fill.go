package bench

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
)

const (
	recoverSlab    = 1 << 20
	recoverFullAt  = 4 * time.Minute // for the process that fills
	recoverGoOn    = 100             // chains saved after the pool is full, before the kill
	recoverSayFull = "full"
)

// recoverOptions returns the options of a pool of that many slots, at most a slab more.
func recoverOptions(path string, slots int) dram.Options {
	bytes := int64(slots) * recoverSlotBytes
	return dram.Options{Bytes: (bytes + recoverSlab - 1) / recoverSlab * recoverSlab, SlabBytes: recoverSlab,
		Path: path, Policy: evict.Named(evict.DefaultName)}
}

// recoverFillCommand is the process that is killed.
func recoverFillCommand() *cobra.Command {
	return &cobra.Command{
		Use: "fill PATH SLOTS", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			slots, err := strconv.Atoi(args[1])
			if err != nil {
				return settings.Invalid(err)
			}
			return recoverFill(args[0], slots, cmd.OutOrStdout())
		},
	}
}

// recoverFill saves chains until it is killed, and reports how many are saved once the pool is
// full.
func recoverFill(path string, slots int, out io.Writer) error {
	p, err := dram.Open(recoverOptions(path, slots))
	if err != nil {
		return err
	}
	id, err := p.OpenSpace(recoverSpec())
	if err != nil {
		return err
	}
	for chain := 0; ; chain++ {
		saveRecoverChain(p, id, chain)
		if saved := (chain + 1) * recoverChain; saved >= slots+recoverChain {
			if _, err := fmt.Fprintln(out, recoverSayFull, chain+1); err != nil {
				return err // the parent has ended
			}
		}
	}
}

func recoverSpec() pool.Spec {
	return pool.Spec{Identity: []byte("bench recover"), Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{recoverSlotBytes}}}}
}

// recoverHashes returns a chain by its number.
func recoverHashes(chain int) pool.Hashes {
	blob := make([]byte, 0, recoverChain*pool.MaxHashLen)
	for i := range uint64(recoverChain) {
		for word := range uint64(pool.MaxHashLen / 8) {
			blob = binary.LittleEndian.AppendUint64(blob, (uint64(chain)<<16|i<<2|word)*0x9e3779b97f4a7c15)
		}
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

// recoverBytes fills a block with its hash, repeatedly.
func recoverBytes(b, hash []byte) {
	for n := 0; n < len(b); {
		n += copy(b[n:], hash)
	}
}

func recoverBatch(id pool.SpaceID, chain int) pool.Batch {
	return pool.Batch{Space: id, Epoch: 1, Hashes: recoverHashes(chain), Status: make([]pool.Status, recoverChain),
		Slots: make([]pool.Slot, recoverChain)}
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

// recoverFilled is what the killed process had done.
type recoverFilled struct {
	chains int // saved
	took   time.Duration
}

// fillAndKill runs that process, and kills it while it saves into the full pool.
func fillAndKill(path string, slots int) (f recoverFilled, err error) {
	self, err := os.Executable()
	if err != nil {
		return f, err
	}
	began := time.Now()
	cmd := exec.Command(self, "bench", "recover", "fill", path, strconv.Itoa(slots))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return f, err
	}
	if err := cmd.Start(); err != nil {
		return f, err
	}
	late := time.AfterFunc(recoverFullAt, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	for lines, full := bufio.NewScanner(out), 0; lines.Scan(); {
		if number, ok := strings.CutPrefix(lines.Text(), recoverSayFull+" "); ok {
			if n, err := strconv.Atoi(number); err == nil {
				f.chains = n // the last line may be cut
			}
			if full++; full == 1 {
				f.took = time.Since(began)
			}
			if full == recoverGoOn {
				_ = cmd.Process.Kill() // it is a child, and there until Wait
			}
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Exited() || f.chains == 0 {
		return f, fmt.Errorf("the process that fills the pool ended by itself: %w\n%s",
			errors.Join(err, io.ErrUnexpectedEOF), stderr.String())
	}
	return f, nil
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
