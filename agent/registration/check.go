package registration

import (
	"fmt"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Limits of a registration's fields besides those of package ipc.
const (
	maxBlockTokens = 1 << 20 // tokens of one block
	maxAlign       = 1 << 24 // least common multiple of the block sizes of a space, tokens
	maxBlocks      = 1 << 28 // blocks of one group of an engine
	maxShardBytes  = 1 << 30 // bytes of one block of one shard
	maxRegionBytes = 1 << 46
	maxAddr        = 1 << 47 // end of a process's address space
	cudaHandle     = 64      // bytes of a CUDA IPC handle
	gpuUUID        = 16      // bytes of a GPU's UUID, at the end of a region's handle
)

// Check checks every field of a REGISTER against docs/PROTOCOL.md. Its errors name the field, the
// value and what is allowed; they are the text of the refusal.
func Check(r *ipc.Register, dir string) error {
	if err := checkName("instance", r.Instance); err != nil {
		return err
	}
	if err := checkPlace(r); err != nil {
		return err
	}
	if err := checkIdentity(r.Identity); err != nil {
		return err
	}
	if err := checkGroups(r.HashTokens, r.Groups); err != nil {
		return err
	}
	if r.LookupName != "" {
		if err := checkLookupName(dir, r.LookupName); err != nil {
			return err
		}
	}
	if r.Role == ipc.RoleScheduler {
		return checkScheduler(r)
	}
	return checkWorker(r)
}

func checkName(field, v string) error {
	if len(v) < 1 || len(v) > ipc.MaxName {
		return fmt.Errorf("%s: %d bytes, allowed: 1 to %d", field, len(v), ipc.MaxName)
	}
	if !utf8.ValidString(v) || strings.ContainsFunc(v, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return fmt.Errorf("%s: %q, allowed: UTF-8 without control characters", field, v)
	}
	return nil
}

// inRange returns an error if an integer field is not within low and high.
func inRange(field string, v, low, high uint64) error {
	if v < low || v > high {
		return fmt.Errorf("%s: %d, allowed: %d to %d", field, v, low, high)
	}
	return nil
}

func checkPlace(r *ipc.Register) error {
	if err := inRange("role", uint64(r.Role), ipc.RoleScheduler, ipc.RoleWorker); err != nil {
		return err
	}
	if err := inRange("world", uint64(r.World), 1, ipc.MaxWorld); err != nil {
		return err
	}
	if err := inRange("rank", uint64(r.Rank), 0, uint64(r.World)-1); err != nil {
		return err
	}
	if err := inRange("shards", uint64(r.Shards), 1, ipc.MaxShards); err != nil {
		return err
	}
	for i, shard := range r.Held {
		if err := inRange(fmt.Sprintf("held[%d]", i), uint64(shard), 0, uint64(r.Shards)-1); err != nil {
			return err
		}
		if i > 0 && shard <= r.Held[i-1] {
			return fmt.Errorf("held[%d]: %d after %d, allowed: ascending, no shard twice", i, shard, r.Held[i-1])
		}
	}
	return nil
}

func checkIdentity(pairs []ipc.Pair) error {
	if len(pairs) > ipc.MaxIdentityPairs {
		return fmt.Errorf("identity: %d pairs, allowed: at most %d", len(pairs), ipc.MaxIdentityPairs)
	}
	need := map[string]bool{"model": true, "dtype": true, "tenant": true}
	size := 0
	for i, p := range pairs {
		if i > 0 && p.Key <= pairs[i-1].Key {
			return fmt.Errorf("identity: key %q after %q, allowed: sorted, no key twice", p.Key, pairs[i-1].Key)
		}
		if p.Key == "" || !utf8.ValidString(p.Key) || !utf8.ValidString(p.Value) {
			return fmt.Errorf("identity: pair %d (%q), allowed: UTF-8, and a key that is not empty", i, p.Key)
		}
		if p.Value == "" && p.Key != "tenant" && need[p.Key] {
			return fmt.Errorf("identity: %s is empty, allowed: a value", p.Key)
		}
		size += len(p.Key) + len(p.Value)
		delete(need, p.Key)
	}
	if size > ipc.MaxIdentityBytes {
		return fmt.Errorf("identity: %d bytes, allowed: at most %d", size, ipc.MaxIdentityBytes)
	}
	for _, key := range []string{"model", "dtype", "tenant"} {
		if need[key] {
			return fmt.Errorf("identity: no %s, allowed: model, dtype and tenant must be there", key)
		}
	}
	return nil
}

func checkGroups(hashTokens uint32, groups []ipc.GroupDesc) error {
	if err := inRange("hash_tokens", uint64(hashTokens), 1, maxBlockTokens); err != nil {
		return err
	}
	if err := inRange("groups", uint64(len(groups)), 1, ipc.MaxGroups); err != nil {
		return err
	}
	align := uint64(1)
	for i, g := range groups {
		if err := inRange(fmt.Sprintf("groups[%d].block_tokens", i), uint64(g.BlockTokens), 1,
			maxBlockTokens); err != nil {
			return err
		}
		if g.BlockTokens%hashTokens != 0 {
			return fmt.Errorf("groups[%d].block_tokens: %d, allowed: a multiple of hash_tokens (%d)", i, g.BlockTokens,
				hashTokens)
		}
		if err := inRange(fmt.Sprintf("groups[%d].num_blocks", i), uint64(g.NumBlocks), 1, maxBlocks); err != nil {
			return err
		}
		if align = lcm(align, uint64(g.BlockTokens)); align > maxAlign {
			return fmt.Errorf("groups[%d].block_tokens: %d makes the least common multiple of all %d, allowed: at "+
				"most %d", i, g.BlockTokens, align, maxAlign)
		}
	}
	return nil
}

// lcm returns the least common multiple. The caller has checked that the product fits.
func lcm(a, b uint64) uint64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

func checkScheduler(r *ipc.Register) error {
	switch {
	case r.Rank != 0:
		return fmt.Errorf("rank: %d, allowed: 0 for a scheduler", r.Rank)
	case len(r.Held) != 0:
		return fmt.Errorf("held: %d shards, allowed: none for a scheduler", len(r.Held))
	case r.Sync != nil:
		return fmt.Errorf("sync: given, allowed: none for a scheduler")
	case r.Regions != 0:
		return fmt.Errorf("regions: %d, allowed: 0 for a scheduler", r.Regions)
	case r.Segments != 0:
		return fmt.Errorf("segments: %d, allowed: 0 for a scheduler", r.Segments)
	}
	return nil
}

func checkWorker(r *ipc.Register) error {
	if err := inRange("regions", uint64(r.Regions), 1, ipc.MaxRegions); err != nil {
		return err
	}
	if len(r.Held) == 0 {
		return fmt.Errorf("held: no shards, allowed: 1 to %d for a worker", r.Shards)
	}
	if err := inRange("segments", uint64(r.Segments), uint64(len(r.Groups)*len(r.Held)), ipc.MaxSegments); err != nil {
		return err
	}
	if r.Sync == nil {
		return nil
	}
	if err := inRange("sync.events", uint64(r.Sync.Events), 0, ipc.MaxEvents); err != nil {
		return err
	}
	return inRange("sync.revokes", uint64(r.Sync.Revokes), 0, ipc.MaxEvents)
}

// importKind returns the device's kind of a region kind of the protocol, and whether a descriptor
// comes with it. checkRegion refuses unknown kinds.
func importKind(kind uint8) (k cudaipc.Kind, fd bool) {
	switch kind {
	case ipc.RegionFD:
		return cudaipc.KindFD, true
	case ipc.RegionPeer:
		return cudaipc.KindPeer, false
	case ipc.RegionCUDA:
		return cudaipc.KindCUDA, false
	case ipc.RegionCUDAFD:
		return cudaipc.KindCUDAFD, true
	}
	return 0, false
}

// checkLookupName returns an error unless a client may have a look-up socket of that name in dir.
func checkLookupName(dir, name string) error {
	if err := socketdir.CheckName(name); err != nil {
		return err
	}
	if n := len(filepath.Join(dir, name)); n > ipc.MaxSocketPath {
		return fmt.Errorf("lookup_name: its path has %d bytes, allowed: at most %d (the directory's has %d)", n,
			ipc.MaxSocketPath, len(dir))
	}
	return nil
}
