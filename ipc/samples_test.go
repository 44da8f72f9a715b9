package ipc

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
)

// Types and values that the vectors are made of.

type namedMessage struct {
	name    string
	version uint32
	msg     any
}

// run is n bytes that count up from first.
func run(first byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = first + byte(i)
	}
	return b
}

func blockIDs(ids ...uint32) (b []byte) {
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}

func manyPairs(n int) (pairs []Pair) {
	for i := range n {
		pairs = append(pairs, Pair{fmt.Sprintf("key%02d", i), strings.Repeat("v", i)})
	}
	return pairs
}

func sessionMessages() (all []namedMessage) {
	all = append(all, openingMessages()...)
	all = append(all, registerMessages()...)
	all = append(all, jobMessages()...)
	all = append(all, transferMessages()...)
	all = append(all, stagedMessages()...)
	all = append(all, eventMessages()...)
	return append(all, answerMessages()...)
}

func openingMessages() []namedMessage {
	boot := [16]byte(run(0x10, 16))
	return []namedMessage{
		{"hello", 3, &Hello{MinVersion: 1, MaxVersion: 3, Software: "vllm 0.33.0"}},
		{"hello_empty", 3, &Hello{MinVersion: 1, MaxVersion: 1}},
		{"hello_max", 3, &Hello{MinVersion: math.MaxUint32, MaxVersion: math.MaxUint32,
			Software: strings.Repeat("ä", MaxName/2)}},
		{"welcome", 3, &Welcome{Version: 3, Boot: boot, Session: 300, MaxFrame: MaxFrame, MaxJobBlocks: MaxJobBlocks,
			MaxQueue: 256, LeaseBytes: 8 << 30, Peer: "node-1:7460"}},
		{"welcome_no_peer", 3, &Welcome{Version: 3, Boot: boot, Session: 1}},
		{"welcome_max", 3, &Welcome{Version: 3, Boot: boot, Session: math.MaxUint64, MaxFrame: math.MaxUint32,
			MaxJobBlocks: math.MaxUint32, MaxQueue: math.MaxUint32, LeaseBytes: math.MaxUint64,
			Peer: strings.Repeat("p", MaxPeerAddress)}},
	}
}

func registerMessages() (all []namedMessage) {
	identity := []Pair{{"dtype", "bfloat16"}, {"model", "meta/llama-8b"}, {"tenant", ""}}
	scheduler := &Register{Req: 1, Instance: "engine-0", Role: RoleScheduler, World: 2, Shards: 2, Identity: identity,
		Groups: []GroupDesc{{16, 1000, 0}}, HashTokens: 16, LookupName: "lookup_rpc_port_0_dp_rank0"}
	worker := &Register{Req: 2, Instance: "engine-0", Role: RoleWorker, Rank: 1, World: 2, Held: []uint32{1}, Shards: 2,
		Identity: identity,
		Groups:   []GroupDesc{{16, 1000, 0}, {32, 70000, 4096}}, HashTokens: 16,
		Sync:    &SyncDesc{Region: 0, StepOff: 0, EventsOff: 64, Events: 128, RevokeOff: 4096, Revokes: 1024},
		Regions: 2, Segments: 64}
	all = append(all, namedMessage{"register_scheduler", 3, scheduler})
	all = append(all, namedMessage{"register_worker", 3, worker})
	all = append(all, namedMessage{"register_max", 3, &Register{Req: math.MaxUint32,
		Instance: strings.Repeat("i", MaxName), Role: RoleWorker,
		Rank: MaxWorld - 1, World: MaxWorld, Held: []uint32{MaxShards - 1}, Shards: MaxShards,
		Identity: manyPairs(MaxIdentityPairs),
		Groups:   make16Groups(), HashTokens: math.MaxUint32, LookupName: strings.Repeat("n", MaxName),
		Sync:    &SyncDesc{math.MaxUint32, math.MaxUint64, math.MaxUint64, MaxEvents, math.MaxUint64, MaxEvents},
		Regions: MaxRegions, Segments: MaxSegments}})
	cells := *worker
	cells.Rank, cells.World, cells.Held, cells.Shards = 0, 1, []uint32{0, 1, 127, 128, MaxShards - 1}, MaxShards
	all = append(all, namedMessage{"register_cells", 3, &cells})
	all = append(all, namedMessage{"register_no_identity", 3,
		&Register{Instance: "x", World: 1, Shards: 1, Groups: []GroupDesc{{1, 0, 0}}, HashTokens: 1}})
	all = append(all, namedMessage{"regions", 3, &Regions{Req: 2, List: []RegionDesc{
		{ID: 0, Kind: RegionFD, Size: 8192},
		{ID: 1, Kind: RegionPeer, Size: 1 << 32, Addr: 0x7f0000000000},
		{ID: 2, Kind: RegionCUDA, Size: 1 << 30, Addr: 1 << 21, Handle: run(0, 80)},
		{ID: 3, Kind: RegionCUDAFD, Size: 2 << 20, Handle: run(64, 16)},
		{ID: 3, Kind: RegionCUDAFD, Size: 20 << 20, Handle: run(64, 16)}}}})
	all = append(all, namedMessage{"regions_empty", 3, &Regions{Req: 0}}, namedMessage{"regions_long_handle", 3,
		&Regions{Req: 127, List: []RegionDesc{{ID: math.MaxUint32, Kind: RegionCUDA, Size: math.MaxUint64,
			Addr: math.MaxUint64, Handle: run(0, MaxHandle)}}}})
	pieces := []SegmentDesc{{1, 0, 32768, 32768}, {1, 1 << 33, 32768, 65536}}
	most := []SegmentDesc{{math.MaxUint32, math.MaxUint64, math.MaxUint64, math.MaxUint32}}
	return append(all,
		namedMessage{"segments", 3, &Segments{Req: 2, Shard: 130, Group: 1, List: pieces}},
		namedMessage{"segments_empty", 3, &Segments{Req: 128}},
		namedMessage{"segments_max", 3,
			&Segments{Req: 65536, Shard: MaxShards - 1, Group: MaxGroups - 1, List: most}})
}

func make16Groups() (groups []GroupDesc) {
	for i := range uint32(MaxGroups) {
		groups = append(groups, GroupDesc{16 << i, 255 + i, i * 128})
	}
	return groups
}

func jobMessages() []namedMessage {
	start := Section{HashLen: 32, Hashes: run(1, 64), Blocks: blockIDs(7, 0x01020304)}
	next := Section{Group: 1, Parent: run(0x40, 16), HashLen: 16, Hashes: run(0x50, 16),
		Blocks: blockIDs(math.MaxUint32)}
	short := Section{Group: MaxGroups - 1, Parent: []byte{9}, HashLen: 1, Hashes: run(0, 256),
		Blocks: make([]byte, 4*256)}
	return []namedMessage{
		{"save", 3, &Save{Job: 1, Epoch: 1, Step: 41, Event: 3, Revoke: 17, Sections: []Section{start, next}}},
		{"save_bin16", 3, &Save{Job: 0, Epoch: 0, Step: 0, Event: None, Revoke: None, Sections: []Section{short}}},
		{"save_max", 3, &Save{Job: math.MaxUint64, Epoch: math.MaxUint32, Step: math.MaxUint64, Event: None,
			Revoke: None, Sections: repeat(next, MaxSections)}},
		{"load", 3, &Load{Job: 2, Epoch: 1, Step: 42, Event: 0, Lease: 0, Sections: []Section{start, next}}},
		{"load_max", 3, &Load{Job: math.MaxUint64, Epoch: math.MaxUint32, Step: math.MaxUint64, Event: None,
			Lease: math.MaxUint64, Sections: []Section{next}}},
		{"cancel", 3, &Cancel{Job: 1 << 40}},
		{"cancelled", 3, &Cancelled{Job: math.MaxUint64}},
		{"done", 3, &Done{Job: 1, Status: []byte{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20}}},
		{"done_empty", 3, &Done{Job: 0}},
		{"release", 3, &Release{Leases: []uint64{0, 127, 128, 255, 256, 65535, 65536, 1<<32 - 1, 1 << 32,
			math.MaxUint64}}},
		{"release_empty", 3, &Release{}},
		{"release_16", 3, &Release{Leases: make([]uint64, 16)}},
	}
}

func transferMessages() []namedMessage {
	name, longest := []byte("r/engine-0/cmpl-7"), run(0, MaxTransferName)
	return []namedMessage{
		{"offer", 3, &Offer{Name: name, Tokens: 9856, TTLMS: 30_000}},
		{"offer_least", 3, &Offer{Name: []byte{0}, TTLMS: 1}},
		{"offer_max", 3, &Offer{Name: longest, Tokens: math.MaxUint32, TTLMS: MaxTransferMS}},
		{"offered", 3, &Offered{Name: name, Tokens: 9856}},
		{"offered_nothing", 3, &Offered{Name: name}},
		{"offered_max", 3, &Offered{Name: longest, Tokens: math.MaxUint32}},
		{"delivered", 3, &Delivered{Name: name}},
		{"delivered_max", 3, &Delivered{Name: longest}},
		{"steps", 3, &Steps{List: run(1, StepBytes)}},
		{"steps_max", 3, &Steps{List: run(0, MaxSteps*StepBytes)}},
		{"budget", 3, &Budget{Bytes: 100 << 30}},
		{"budget_none", 3, &Budget{}},
		{"budget_max", 3, &Budget{Bytes: MaxBudget}},
		{"hint", 3, &Hint{Req: 7, Session: "chat-1", Finish: MaxFinish, Output: 311, Actions: []HintAction{
			{ID: "a1", Kind: HintRetain, Priority: 90, MS: 60_000}, {Kind: HintFetch, Peer: "10.0.0.2:9470"},
		}, Chains: []HintChain{
			{HashLen: 4, Hashes: run(0x20, 8), Own: []byte{2}}, {Group: 1, HashLen: 4, Hashes: run(0, 4)},
		}}},
		{"hint_end", 3, &Hint{Finish: 1, Output: 1, Chains: []HintChain{{HashLen: 1, Hashes: []byte{7}}}}},
		{"hint_max", 3, &Hint{Req: None, Session: strings.Repeat("s", MaxHintID), Actions: []HintAction{
			{ID: strings.Repeat("i", MaxHintID), Kind: HintDrop, Priority: MaxPriority, MS: MaxHintMS},
		}, Chains: []HintChain{{Group: MaxGroups - 1, HashLen: MaxHashLen, Hashes: run(0, 64), Own: []byte{3}}}}},
		{"hinted", 3, &Hinted{Req: 7, Receipts: []HintReceipt{
			{ID: "a1", Kind: HintRetain, State: HintClipped, Blocks: 8, Bytes: 1 << 33, Reason: "the session's share"},
			{Kind: HintPrefetch, State: HintMissing},
		}}},
	}
}

func stagedMessages() []namedMessage {
	section := Section{Parent: run(0, 4), HashLen: 4, Hashes: run(0x20, 8), Blocks: blockIDs(1, 2)}
	return []namedMessage{
		{"stages", 3, &Stages{Off: 20544, Count: 64, List: []byte{0, 0, 0, 0, 1, 0, 2, 1}}},
		{"stages_max", 3, &Stages{Off: math.MaxUint64, Count: MaxStageWords, List: run(0, 600)}},
		{"staged_load", 3, &StagedLoad{Job: 7, Epoch: 1, Step: 41, Event: 3, Lease: 9, Word: 2,
			Sections: []Section{section}}},
		{"staged_load_max", 3, &StagedLoad{Job: math.MaxUint64, Epoch: math.MaxUint32, Step: math.MaxUint64,
			Event: None, Lease: math.MaxUint64, Word: MaxStageWords - 1, Sections: []Section{section, section}}},
	}
}

func eventMessages() []namedMessage {
	stored := EventRun{Kind: EventStored, Medium: MediumMemory, Group: 1, Parent: run(0, 4), HashLen: 4,
		Hashes: run(0x20, 8), Tokens: run(0x40, 16), Extra: []byte{9}}
	removed := EventRun{Kind: EventRemoved, Medium: math.MaxUint8, HashLen: MaxHashLen, Hashes: run(0, 64)}
	return []namedMessage{
		{"block_tokens", 3, &BlockTokens{Group: 1, Parent: run(0, 4), HashLen: 4, Hashes: run(0x20, 8),
			Tokens: run(0x40, 16), Extra: []byte{9}}},
		{"block_tokens_root", 3, &BlockTokens{HashLen: 1, Hashes: []byte{7}, Tokens: run(0, 4)}},
		{"block_tokens_max", 3, &BlockTokens{Group: MaxGroups - 1, Parent: run(0, MaxHashLen), HashLen: MaxHashLen,
			Hashes: run(0, 96), Tokens: run(0, 192), Extra: run(0, MaxExtra)}},
		{"next_events", 3, &NextEvents{Req: 1, Blocks: 1}},
		{"next_events_max", 3, &NextEvents{Req: math.MaxUint32, Blocks: MaxEventBlocks, Anew: true}},
		{"block_events", 3, &BlockEvents{
			Req: math.MaxUint32, State: EventsWhole, Runs: []EventRun{stored, removed, stored},
		}},
		{"block_events_none", 3, &BlockEvents{State: EventsWhole}},
		{"block_events_refused", 3, &BlockEvents{State: EventsRefused}},
		{"block_events_void", 3, &BlockEvents{Req: 7, State: EventsVoid}},
	}
}

func repeat(s Section, n int) (all []Section) {
	for range n {
		all = append(all, s)
	}
	return all
}

func answerMessages() (all []namedMessage) {
	space := [16]byte(run(0xa0, 16))
	for _, m := range []namedMessage{
		{"registered", 0, &Registered{Req: 2, Space: space, Epoch: 1, LookupPath: "/run/kvagent/lookup.sock"}},
		{"registered_refused", 0, &Registered{Req: 2, Status: RegRefused, Text: "world: 65, allowed is 1 to 64"}},
		{"registered_max", 0, &Registered{Req: math.MaxUint32, Status: 255, Text: strings.Repeat("t", MaxText),
			Space: space, Epoch: math.MaxUint32, LookupPath: strings.Repeat("/", MaxSocketPath)}},
		{"unregister", 0, &Unregister{Req: 3}}, {"unregistered", 0, &Unregistered{Req: 3}},
		{"unregistered_refused", 0, &Unregistered{Req: 3, Status: RegRefused, Text: "no registration"}},
		{"reset", 0, &Reset{Req: 4}}, {"reset_done", 0, &ResetDone{Req: 4, Epoch: 2}},
		{"reset_refused", 0, &ResetDone{Req: 4, Status: RegRefused, Text: "nothing is registered", Epoch: 0}},
		{"ping", 0, &Ping{Req: 5}}, {"pong", 0, &Pong{Req: math.MaxUint32}},
		{"error", 0, &Error{Code: ErrCodeVersion, Text: "version: 3 to 4, allowed is 1 to 2"}},
		{"error_empty", 0, &Error{}},
	} {
		all = append(all, namedMessage{m.name, 3, m.msg})
	}
	return append(all, namedMessage{"epoch", 3, &Epoch{Epoch: 3}},
		namedMessage{"switches_on", 3, &Switches{Loads: true, Saves: true}},
		namedMessage{"switches_loads_off", 3, &Switches{Saves: true}})
}

type malformedMessage struct {
	name    string
	version uint32
	frame   []byte
}

func enc(msg any) []byte {
	b, err := Encode(nil, msg)
	if err != nil {
		panic(err)
	}
	return b
}

// swap replaces the first old in the encoded message.
func swap(msg any, old, by string) []byte {
	b := enc(msg)
	if !bytes.Contains(b, []byte(old)) {
		panic(fmt.Sprintf("%x is not in %x", old, b))
	}
	return bytes.Replace(b, []byte(old), []byte(by), 1)
}

func malformedMessages() []malformedMessage {
	hello := &Hello{MinVersion: 1, MaxVersion: 2, Software: "x"}
	pairs := &Register{Req: 1, Instance: "x", World: 1, Shards: 1, Identity: []Pair{{"a", "1"}, {"b", "2"}},
		Groups: []GroupDesc{{16, 9, 0}}, HashTokens: 16}
	cells := &Register{Req: 1, Instance: "x", Role: RoleWorker, World: 1, Held: []uint32{0, 255}, Shards: MaxShards,
		Groups: []GroupDesc{{16, 9, 0}}, HashTokens: 16}
	load := &Load{Job: 1, Epoch: 1, Sections: []Section{{Parent: run(0, 4), HashLen: 4, Hashes: run(0x20, 8),
		Blocks: blockIDs(1, 2)}}}
	release := &Release{Leases: []uint64{5}}
	stages := &Stages{Off: 8, Count: 2, List: []byte{0, 0}}
	offer := &Offer{Name: []byte{7}, Tokens: 16, TTLMS: 1000}
	hint := &Hint{Req: 1, Actions: []HintAction{{ID: "a", Kind: HintPin, MS: 1000}},
		Chains: []HintChain{{Group: 1, HashLen: 4, Hashes: run(0x20, 8), Own: []byte{1}}}}
	tokens := &BlockTokens{Parent: run(0, 4), HashLen: 4, Hashes: run(0x20, 8), Tokens: run(0x40, 16)}
	events := &BlockEvents{Runs: []EventRun{{Kind: EventRemoved, Medium: 1, HashLen: 2, Hashes: run(0x20, 4)}}}
	return []malformedMessage{
		{"empty_frame", 3, nil},
		{"no_array", 3, []byte{0x0d}},
		{"empty_array", 3, []byte{0x90}},
		{"array_not_shortest", 3, []byte{0xdc, 0x00, 0x02, 0x0d, 0x01}},
		{"type_0", 3, []byte{0x92, 0x00, 0x01}},
		{"type_unknown", 3, []byte{0x92, 0x16, 0x01}},
		{"type_300", 3, []byte{0x92, 0xcd, 0x01, 0x2c, 0x01}},
		{"type_no_number", 3, []byte{0x92, 0xa1, 0x31, 0x01}},
		{"too_few_fields", 3, []byte{0x91, 0x0d}},
		{"too_many_fields", 3, []byte{0x93, 0x0d, 0x01, 0x01}},
		{"bytes_behind", 3, []byte{0x92, 0x0d, 0x01, 0x00}},
		{"cut_short", 3, []byte{0x92, 0x0d, 0xcd, 0x01}},
		{"uint_not_shortest", 3, []byte{0x92, 0x0d, 0xcc, 0x7f}},
		{"uint32_not_shortest", 3, []byte{0x92, 0x0d, 0xce, 0x00, 0x00, 0xff, 0xff}},
		{"negative", 3, []byte{0x92, 0x0d, 0xff}},
		{"signed", 3, []byte{0x92, 0x0d, 0xd2, 0x00, 0x00, 0x00, 0x01}},
		{"float", 3, []byte{0x92, 0x0d, 0xca, 0x3f, 0x80, 0x00, 0x00}},
		{"nil", 3, []byte{0x92, 0x0d, 0xc0}},
		{"map", 3, []byte{0x81, 0x0d, 0x01}},
		{"req_above_u32", 3, []byte{0x92, 0x0d, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0}},
		{"hello_version_0", 3, swap(hello, "\x94\x01\x01", "\x94\x01\x00")},
		{"hello_min_above_max", 3, swap(hello, "\x01\x01\x02", "\x01\x03\x02")},
		{"hello_not_utf8", 3, swap(hello, "\xa1x", "\xa1\xff")},
		{"hello_bin_for_str", 3, swap(hello, "\xa1x", "\xc4\x01x")},
		{"hello_name_too_long", 3, swap(hello, "\xa1x", "\xd9\x81"+strings.Repeat("x", 129))},
		{"hello_str_not_shortest", 3, swap(hello, "\xa1x", "\xd9\x01x")},
		{"hello_huge_str", 3, swap(hello, "\xa1x", "\xdb\xff\xff\xff\xffx")},
		{"welcome_version_4", 3, swap(&Welcome{Version: 3}, "\x99\x02\x03", "\x99\x02\x04")},
		{"welcome_peer_of_129", 3, append(enc(&Welcome{Version: 3})[:26],
			"\xd9\x81"+strings.Repeat("p", MaxPeerAddress+1)...)},
		{"welcome_short_boot", 3, swap(&Welcome{Version: 3}, "\xc4\x10\x00", "\xc4\x0f")},
		{"register_role_2", 3, swap(pairs, "\xa1x\x00", "\xa1x\x02")},
		{"register_rank_64", 3, swap(pairs, "\xa1x\x00\x00", "\xa1x\x00\x40")},
		{"register_world_0", 3, swap(pairs, "\xa1x\x00\x00\x01", "\xa1x\x00\x00\x00")},
		{"register_unsorted", 3, swap(pairs, "\xa1a", "\xa1c")},
		{"register_key_twice", 3, swap(pairs, "\xa1a", "\xa1b")},
		{"register_pair_of_3", 3, swap(pairs, "\x92\xa1a\xa11", "\x93\xa1a\xa11\xa1x")},
		{"register_no_groups", 3, swap(pairs, "\x91\x93\x10\x09\x00", "\x90")},
		{"register_block_tokens_0", 3, swap(pairs, "\x91\x93\x10\x09\x00", "\x91\x93\x00\x09\x00")},
		{"register_sync_of_5", 3, swap(pairs, "\xa0\x90\x00\x00", "\xa0\x95\x00\x00\x00\x00\x00\x00\x00")},
		{"register_no_instance", 3, swap(pairs, "\xa1x", "\xa0")},
		{"regions_254", 3, []byte{0x93, 0x04, 0x01, 0xdc, 0x00, 0xfe}},
		{"regions_kind_0", 3, swap(&Regions{List: []RegionDesc{{ID: 1, Kind: 1, Size: 9}}}, "\x95\x01\x01",
			"\x95\x01\x00")},
		{"regions_kind_5", 3, swap(&Regions{List: []RegionDesc{{ID: 1, Kind: 1, Size: 9}}}, "\x95\x01\x01",
			"\x95\x01\x05")},
		{"regions_promised", 3, []byte{0x93, 0x04, 0x01, 0xdc, 0x00, 0xfd, 0x95, 0x01}},
		{"segments_group_16", 3, swap(&Segments{Group: 15}, "\x0f", "\x10")},
		{"segments_8193", 3, []byte{0x95, 0x05, 0x01, 0x00, 0x00, 0xdc, 0x20, 0x01}},
		{"segments_huge", 3, []byte{0x95, 0x05, 0x01, 0x00, 0x00, 0xdd, 0xff, 0xff, 0xff, 0xff}},
		{"segments_bytes_0", 3, swap(&Segments{List: []SegmentDesc{{1, 2, 3, 4}}}, "\x01\x02\x03\x04",
			"\x01\x02\x03\x00")},
		{"segments_shard_256", 3, swap(&Segments{Req: 1, Shard: 255}, "\xcc\xff", "\xcd\x01\x00")},
		{"register_held_256", 3, swap(cells, "\x92\x00\xcc\xff", "\x92\x00\xcd\x01\x00")},
		{"register_holds_257", 3, swap(cells, "\x92\x00\xcc\xff", "\xdc\x01\x01\x00\xcc\xff")},
		{"register_shards_257", 3, swap(cells, "\xcd\x01\x00", "\xcd\x01\x01")},
		{"release_4097", 3, []byte{0x92, 0x08, 0xdc, 0x10, 0x01}},
		{"release_no_array", 3, swap(release, "\x91\x05", "\x05")},
		{"release_str", 3, swap(release, "\x91\x05", "\x91\xa15")},
		{"load_no_sections", 3, []byte{0x97, 0x0a, 1, 1, 0, 0, 0, 0x90}},
		{"load_65_sections", 3, []byte{0x97, 0x0a, 1, 1, 0, 0, 0, 0xdc, 0, 65}},
		{"load_hash_len_0", 3, swap(load, "\x04\xc4\x08", "\x00\xc4\x08")},
		{"load_hash_len_33", 3, swap(load, "\x04\xc4\x08", "\x21\xc4\x08")},
		{"load_hash_len_3", 3, swap(load, "\xc4\x04\x00\x01\x02\x03\x04\xc4\x08", "\xc4\x00\x03\xc4\x08")},
		{"load_parent_of_3", 3, swap(load, "\xc4\x04\x00\x01\x02\x03", "\xc4\x03\x00\x01\x02")},
		{"load_no_hashes", 3, swap(load, "\xc4\x08\x20\x21\x22\x23\x24\x25\x26\x27", "\xc4\x00")},
		{"load_one_block_of_two", 3, swap(load, "\xc4\x08\x01\x00\x00\x00\x02\x00\x00\x00",
			"\xc4\x04\x01\x00\x00\x00")},
		{"load_hashes_cut", 3, enc(load)[:20]},
		{"load_bin_not_shortest", 3, swap(load, "\xc4\x08\x20", "\xc5\x00\x08\x20")},
		{"done_too_long", 3, []byte{0x93, 0x0e, 0x01, 0xc5, 0x20, 0x01}},
		{"switches_2", 3, []byte{0x93, 0x14, 0x02, 0x01}},
		{"switches_bool", 3, []byte{0x93, 0x14, 0xc3, 0xc3}},
		{"offer_no_name", 3, swap(offer, "\xc4\x01\x07", "\xc4\x00")},
		{"offer_name_of_257", 3, swap(offer, "\xc4\x01\x07", "\xc5\x01\x01"+string(make([]byte, 257)))},
		{"offer_name_str", 3, swap(offer, "\xc4\x01\x07", "\xa1x")},
		{"offer_ttl_0", 3, swap(offer, "\xcd\x03\xe8", "\x00")},
		{"offer_ttl_600001", 3, swap(offer, "\xcd\x03\xe8", "\xce\x00\x09\x27\xc1")},
		{"offer_tokens_u64", 3, swap(offer, "\x07\x10", "\x07\xcf\x00\x00\x00\x01\x00\x00\x00\x00")},
		{"offer_cut", 3, enc(offer)[:5]},
		{"offered_no_name", 3, []byte{0x93, 0x19, 0xc4, 0x00, 0x10}},
		{"offered_of_4", 3, []byte{0x94, 0x19, 0xc4, 0x01, 0x07, 0x10, 0x00}},
		{"delivered_no_name", 3, []byte{0x92, 0x1a, 0xc4, 0x00}},
		{"stages_count_0", 3, swap(stages, "\x08\x02", "\x08\x00")},
		{"stages_count_1025", 3, swap(stages, "\x08\x02", "\x08\xcd\x04\x01")},
		{"stages_none", 3, swap(stages, "\xc4\x02\x00\x00", "\xc4\x00")},
		{"stages_of_3_bytes", 3, swap(stages, "\xc4\x02\x00\x00", "\xc4\x03\x00\x00\x00")},
		{"staged_load_word_1024", 3, swap(stagedMessages()[3].msg, "\xcd\x03\xff", "\xcd\x04\x00")},
		{"staged_load_no_sections", 3, []byte{0x98, 0x1c, 1, 1, 0, 0, 0, 0, 0x90}},
		{"steps_none", 3, []byte{0x92, 0x1e, 0xc4, 0x00}},
		{"steps_of_13_bytes", 3, append([]byte{0x92, 0x1e, 0xc4, 0x0d}, make([]byte, StepBytes+1)...)},
		{"steps_65", 3, append([]byte{0x92, 0x1e, 0xc5, 0x03, 0x0c}, make([]byte, (MaxSteps+1)*StepBytes)...)},
		{"budget_max_and_1", 3, []byte{0x92, 0x1f, 0xcf, 0, 0, 0x40, 0, 0, 0, 0, 1}},
		{"budget_signed", 3, []byte{0x92, 0x1f, 0xff}},
		{"budget_of_2_fields", 3, []byte{0x93, 0x1f, 1, 1}},
		{"type_40", 3, []byte{0x92, 0x28, 0xc4, 0x01, 0x07}},
		{"hint_session_of_129", 3, swap(hint, "\x1d\x01\xa0", "\x1d\x01\xd9\x81"+strings.Repeat("s", 129))},
		{"hint_finish_5", 3, swap(hint, "\x01\xa0\x00\x00", "\x01\xa0\x05\x00")},
		{"hint_kind_0", 3, swap(hint, "\xa1a\x02", "\xa1a\x00")},
		{"hint_kind_7", 3, swap(hint, "\xa1a\x02", "\xa1a\x07")},
		{"hint_priority_101", 3, swap(hint, "\xa1a\x02\x00", "\xa1a\x02\x65")},
		{"hint_too_long", 3, swap(hint, "\xcd\x03\xe8", "\xce\x05\x26\x5c\x01")},
		{"hint_no_chain", 3, []byte{0x97, 0x1d, 0x01, 0xa0, 0x00, 0x00, 0x90, 0x90}},
		{"hint_group_16", 3, swap(hint, "\x94\x01\x04", "\x94\x10\x04")},
		{"hint_hash_len_0", 3, swap(hint, "\x94\x01\x04", "\x94\x01\x00")},
		{"hint_hash_len_33", 3, swap(hint, "\x94\x01\x04", "\x94\x01\x21")},
		{"hint_hash_len_3", 3, swap(hint, "\x94\x01\x04", "\x94\x01\x03")},
		{"hint_own_of_2", 3, swap(hint, "\xc4\x01\x01", "\xc4\x02\x01\x01")},
		{"hint_of_8", 3, append([]byte{0x98}, append(enc(hint)[1:], 0)...)},
		{"block_tokens_hash_len_3", 3, swap(tokens, "\x04\xc4\x08", "\x03\xc4\x08")},
		{"block_tokens_parent_of_3", 3, swap(tokens, "\xc4\x04\x00\x01\x02\x03", "\xc4\x03\x00\x01\x02")},
		{"block_tokens_of_one_and_a_half", 3, swap(tokens, "\xc4\x10"+string(run(0x40, 16)),
			"\xc4\x0c"+string(run(0x40, 12)))},
		{"block_tokens_none", 3, swap(tokens, "\xc4\x10"+string(run(0x40, 16)), "\xc4\x00")},
		{"next_events_0", 3, []byte{0x94, 0x26, 0x01, 0x00, 0x00}},
		{"next_events_4097", 3, []byte{0x94, 0x26, 0x01, 0xcd, 0x10, 0x01, 0x00}},
		{"next_events_anew_2", 3, []byte{0x94, 0x26, 0x01, 0x01, 0x02}},
		{"block_events_state_4", 3, swap(events, "\x94\x27\x00\x00", "\x94\x27\x00\x04")},
		{"block_events_kind_0", 3, swap(events, "\x98\x02", "\x98\x00")},
		{"block_events_kind_3", 3, swap(events, "\x98\x02", "\x98\x03")},
		{"block_events_medium_0", 3, swap(events, "\x98\x02\x01", "\x98\x02\x00")},
		{"block_events_stored_without_tokens", 3, swap(events, "\x98\x02", "\x98\x01")},
		{"block_events_removed_with_extra", 3, swap(events, "\x23\xc4\x00\xc4\x00", "\x23\xc4\x00\xc4\x01\x00")},
		{"block_events_4097_runs", 3, []byte{0x94, 0x27, 0x00, 0x00, 0xdc, 0x10, 0x01}},
		{"error_text_too_long", 3, append([]byte{0x93, 0x13, 0x01, 0xda, 0x04, 0x01},
			bytes.Repeat([]byte{'x'}, 1025)...)},
	}
}
