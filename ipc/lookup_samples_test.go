package ipc

import (
	"bytes"
	"math"
)

type namedRequest struct {
	name string
	r    LookupRequest
}

func lookupRequests() []namedRequest {
	space := [16]byte(run(0xa0, 16))
	return []namedRequest{
		{"own_reserve", LookupRequest{Form: FormOwn, Space: space, Session: 7, Want: WantReserve,
			Tokens: 4097, DeadlineUS: 500,
			Groups: []uint8{0, 2}, HashLen: 32, Hashes: bytes.Repeat(run(0, 32), 16)}},
		{"own_no_hashes", LookupRequest{Form: FormOwn}},
		{"own_no_hashes_with_length", LookupRequest{Form: FormOwn, Tokens: 5, HashLen: 32}},
		{"own_max", LookupRequest{Form: FormOwn, Space: space, Session: math.MaxUint64, Want: WantReserve,
			Tokens:    math.MaxUint32,
			HBMTokens: math.MaxUint32, DeadlineUS: math.MaxUint32, Groups: run(0, MaxGroups), HashLen: 1,
			Hashes: run(0, 255)}},
		{"own_probe", LookupRequest{Form: FormOwn, Tokens: 64, HBMTokens: 16, HashLen: 16,
			Hashes: run(0, 32)}},
		{"own_transfer", LookupRequest{Form: FormOwn, Space: space, Session: 7, Want: WantReserve,
			Tokens: 4097, DeadlineUS: 500, HashLen: 32, Hashes: run(0, 64),
			Transfer: []byte("r/engine-0/cmpl-7"), Peer: "10.0.0.7:7460"}},
		{"own_ready", LookupRequest{Form: FormOwn, Space: space, Session: 7, Want: WantReady, Tokens: 33,
			HashLen: 32, Hashes: run(0, 64)}},
		{"own_transfer_early", LookupRequest{Form: FormOwn, Space: space, Session: 7, Want: WantReserve,
			Tokens: 33, HashLen: 32, Hashes: run(0, 64), Transfer: []byte("t/xfer"), Early: true}},
		{"own_transfer_max", LookupRequest{Form: FormOwn, Space: space, Session: math.MaxUint64,
			Want: WantReserve, Tokens: math.MaxUint32, HBMTokens: math.MaxUint32, DeadlineUS: math.MaxUint32,
			Groups: run(0, MaxGroups), HashLen: 1, Hashes: run(0, 255), Transfer: run(0, MaxTransferName),
			Peer: string(bytes.Repeat([]byte("p"), MaxPeerAddress)), Early: true}},
		{"upstream", LookupRequest{Form: FormUpstream, Tokens: 48, HashLen: 32, Hashes: run(0, 96)}},
		{"upstream_no_hashes", LookupRequest{Form: FormUpstream, Tokens: 5, HashLen: 0}},
		{"upstream_short_hashes", LookupRequest{Form: FormUpstream, Tokens: math.MaxUint32, HashLen: 8,
			Hashes: run(0, 16)}},
		{"reset", LookupRequest{Form: FormReset}},
		{"ascend2", LookupRequest{Form: FormAscend2, Tokens: 300, HashLen: 32, Hashes: run(0, 64)}},
		{"ascend2_no_hashes", LookupRequest{Form: FormAscend2, Tokens: 5}},
		{"ascend3", LookupRequest{Form: FormAscend3, Tokens: 300, Groups: []uint8{0}, HashLen: 16,
			Hashes: run(0xf0, 16)}},
		{"ascend3_groups", LookupRequest{Form: FormAscend3, Tokens: 300, Groups: []uint8{0, 1, 255}, HashLen: 32,
			Hashes: run(0, 32)}},
		{"ascend4", LookupRequest{Form: FormAscend4, Tokens: 2048, HBMTokens: 256, Groups: []uint8{0}, HashLen: 32,
			Hashes: bytes.Repeat(run(7, 32), 16)}},
		{"ascend4_max", LookupRequest{Form: FormAscend4, Tokens: math.MaxUint32, HBMTokens: math.MaxUint32,
			Groups: run(0, MaxGroups), HashLen: 1, Hashes: run(0, 17)}},
		{"simple", LookupRequest{Form: FormSimple, Tokens: 300, HashLen: 32, Hashes: run(0, 96)}},
		{"simple_no_hashes", LookupRequest{Form: FormSimple, Tokens: math.MaxUint64}},
	}
}

// looseRequests are valid, but not as this package writes them.
func looseRequests() map[string][][]byte {
	u := func(v byte) []byte { return []byte{0, 0, 0, v} }
	return map[string][][]byte{
		"ascend2_array16_str8":  {u(9), []byte("\xdc\x00\x02\xd9\x02ab\xd9\x02cd")},
		"ascend2_array32_str16": {u(9), []byte("\xdd\x00\x00\x00\x02\xda\x00\x02ab\xa2cd")},
		"ascend2_str32":         {u(9), []byte("\x91\xdb\x00\x00\x00\x04abcd")},
		"ascend3_group_uint8":   {u(9), []byte("\x91\xcc\x01"), []byte("\x91\xa2ab")},
		"ascend3_group_int8":    {u(9), []byte("\x91\xd0\x01"), []byte("\x91\xa2ab")},
		"ascend3_group_int64": {u(9),
			[]byte("\x92\xd3\x00\x00\x00\x00\x00\x00\x00\x02\xcf\x00\x00\x00\x00\x00\x00\x00\x03"),
			[]byte("\x91\xa2ab")},
		"ascend3_group_uint16": {u(9), []byte("\xdc\x00\x02\xcd\x00\x01\xd1\x00\x02"), []byte("\x91\xa2ab")},
		"ascend3_no_groups":    {u(9), []byte("\x90"), []byte("\x91\xa2ab")},
		"ascend4_group_uint32_d2": {u(9), []byte("\x92\xce\x00\x00\x00\x01\xd2\x00\x00\x00\x02"), u(4),
			[]byte("\x91\xa2ab")},
		"ascend4_no_hashes_array":  {u(9), []byte("\x91\x00"), u(4), []byte("\xdc\x00\x00")},
		"ascend2_num_hashes_short": {u(0), []byte("\x90")},
	}
}

// malformedRequests are the frames after the delimiter.
func malformedRequests() map[string][][]byte {
	u := func(v byte) []byte { return []byte{0, 0, 0, v} }
	own := encodeRequest(&LookupRequest{Form: FormOwn, Tokens: 64, HashLen: 4, Hashes: run(1, 8)})[0]
	own3 := encodeRequest(&LookupRequest{Form: FormOwn, Tokens: 64, HashLen: 4, Hashes: run(1, 8),
		Transfer: []byte{0xee}, Peer: "h:1"})[0]
	change := func(b []byte, old, by string) [][]byte { return [][]byte{bytes.Replace(b, []byte(old), []byte(by), 1)} }
	simple := []byte{9, 0, 0, 0, 0, 0, 0, 0}
	return map[string][][]byte{
		"no_frame": nil, "empty_frame": {{}}, "one_byte": {{0x9a}}, "five_frames_of_4": {u(1), u(1), u(1), u(1), u(1)},
		"text": {[]byte("hello there")}, "reset_twice": {[]byte("reset"), []byte("reset")}, "one_frame_of_4": {u(1)},
		"lookup_of_3": {[]byte("lookup"), u(1), {0, 32}}, "lookup_of_5": {[]byte("lookup"), u(1), {0, 32}, {}, {}},
		"own_version_2":        change(own, "\x9d\x03", "\x9d\x02"),
		"own_of_10":            change(own, "\x9d\x03", "\x9a\x03"),
		"own_hash_len_0":       change(own, "\x04\xc4\x08", "\x00\xc4\x08"),
		"own_hash_len_33":      change(own, "\x04\xc4\x08", "\x21\xc4\x08"),
		"own_hash_len_3":       change(own, "\x04\xc4\x08", "\x03\xc4\x08"),
		"own_behind":           {append(bytes.Clone(own), 0)},
		"own_cut":              {own[:len(own)-1]},
		"own_not_shortest":     change(own, "\x00\x00\x40", "\x00\x00\xcc\x40"),
		"own_str_for_bin":      change(own, "\x04\xc4\x08", "\x04\xa8"),
		"own_space_of_15":      change(own, "\xc4\x10\x00", "\xc4\x0f"),
		"own_tokens_u64":       change(own, "\x00\x00\x40", "\x00\x00\xcf\x00\x00\x00\x01\x00\x00\x00\x00"),
		"own_groups_17":        change(own, "\xc4\x00\x04\xc4\x08", "\xc4\x11"+string(make([]byte, 17))+"\x04\xc4\x08"),
		"own_version_4":        change(own3, "\x9d\x03", "\x9d\x04"),
		"own_transfer_of_257":  change(own3, "\xc4\x01\xee", "\xc5\x01\x01"+string(make([]byte, 257))),
		"own_transfer_str":     change(own3, "\xc4\x01\xee", "\xa1x"),
		"own_peer_of_129":      change(own3, "\xa3h:1", "\xd9\x81"+string(bytes.Repeat([]byte("p"), 129))),
		"own_peer_not_utf8":    change(own3, "\xa3h:1", "\xa3\xff:1"),
		"own_want_3":           change(own3, "\x00\x00\x40", "\x00\x03\x40"),
		"own_early_2":          change(own3, "\xa3h:1\x00", "\xa3h:1\x02"),
		"own_cut_3":            {own3[:len(own3)-2]},
		"own_behind_3":         {append(bytes.Clone(own3), 0)},
		"upstream_tokens_of_3": {[]byte("lookup"), {0, 0, 1}, {0, 4}, run(0, 8)},
		"upstream_len_of_4":    {[]byte("lookup"), u(1), u(4), run(0, 8)},
		"upstream_len_0":       {[]byte("lookup"), u(1), {0, 0}, run(0, 8)},
		"upstream_len_33":      {[]byte("lookup"), u(1), {0, 33}, run(0, 33)},
		"upstream_len_256":     {[]byte("lookup"), u(1), {1, 0}, run(0, 8)},
		"upstream_not_whole":   {[]byte("lookup"), u(1), {0, 4}, run(0, 9)},
		"ascend_upper_case":    {u(9), []byte("\x91\xa2AB")},
		"ascend_no_hex":        {u(9), []byte("\x91\xa2xy")},
		"ascend_odd":           {u(9), []byte("\x91\xa3abc")},
		"ascend_empty_hash":    {u(9), []byte("\x91\xa0")},
		"ascend_66_digits":     {u(9), append([]byte("\x91\xd9\x42"), bytes.Repeat([]byte("a"), 66)...)},
		"ascend_two_lengths":   {u(9), []byte("\x92\xa2ab\xa4abcd")},
		"ascend_bin_hash":      {u(9), []byte("\x91\xc4\x02ab")},
		"ascend_second_no_str": {u(9), []byte("\x92\xa2ab\x01")},
		"ascend_cut":           {u(9), []byte("\x92\xa2ab\xa2c")},
		"ascend_missing":       {u(9), []byte("\x92\xa2ab")},
		"ascend_promised":      {u(9), []byte("\xdd\x00\x01\x00\x00\xa2ab")},
		"ascend_65537":         {u(9), []byte("\xdd\x00\x01\x00\x01\xa2ab")},
		"ascend_behind":        {u(9), []byte("\x91\xa2ab\x00")},
		"ascend_no_array":      {u(9), []byte("\xa2ab")},
		"ascend_empty":         {u(9), {}},
		"ascend_groups_17":     {u(9), []byte("\xdc\x00\x11"), []byte("\x91\xa2ab")},
		"ascend_group_256":     {u(9), []byte("\x91\xcd\x01\x00"), []byte("\x91\xa2ab")},
		"ascend_group_minus":   {u(9), []byte("\x91\xff"), []byte("\x91\xa2ab")},
		"ascend_group_int8":    {u(9), []byte("\x91\xd0\x80"), []byte("\x91\xa2ab")},
		"ascend_group_behind":  {u(9), []byte("\x91\x00\x00"), []byte("\x91\xa2ab")},
		"ascend_group_missing": {u(9), []byte("\x92\x00"), []byte("\x91\xa2ab")},
		"ascend_hbm_of_3":      {u(9), []byte("\x91\x00"), {0, 0, 1}, []byte("\x91\xa2ab")},
		"simple_hash_of_31":    {simple, run(0, 32), run(0, 31)},
		"simple_empty_hash":    {simple, {}},
	}
}

func encodeRequest(r *LookupRequest) (frames [][]byte) {
	var f Frames
	if err := appendRequest(&f, r); err != nil {
		panic(err)
	}
	for i := range f.Len() {
		frames = append(frames, bytes.Clone(f.At(i)))
	}
	return frames
}

type namedReply struct {
	name string
	r    LookupRequest // form and version
	a    LookupReply
}

func lookupReplies() []namedReply {
	boot := [16]byte(run(0x10, 16))
	own := LookupRequest{Form: FormOwn}
	all := []namedReply{
		{"own_miss", own, LookupReply{Boot: boot}},
		{"own_hit", own, LookupReply{Tokens: 4096, Lease: 300, Boot: boot, Disk: 1024, Shared: 16}},
		{"own_ready", own, LookupReply{Status: LookupReady, Tokens: 2048, Lease: 302, Boot: boot}},
		{"own_pending_some", own, LookupReply{Status: LookupPending, Tokens: 2048, Lease: 301, Boot: boot}},
		{"own_max", own, LookupReply{Status: 255, Tokens: math.MaxUint32, Lease: math.MaxUint64, Boot: boot}},
	}
	for s, name := range []string{1: "pending", "off", "not_registered", "malformed", "overloaded", "no_session",
		"lease_cap"} {
		if s > 0 {
			all = append(all, namedReply{"own_" + name, own, LookupReply{Status: LookupStatus(s), Boot: boot}})
		}
	}
	return append(all, namedReply{"upstream_hit", LookupRequest{Form: FormUpstream}, LookupReply{Tokens: 48}},
		namedReply{"upstream_miss", LookupRequest{Form: FormUpstream}, LookupReply{}},
		namedReply{"reset_done", LookupRequest{Form: FormReset}, LookupReply{}},
		namedReply{"reset_refused", LookupRequest{Form: FormReset}, LookupReply{Status: LookupOff}},
		namedReply{"ascend2_hit", LookupRequest{Form: FormAscend2}, LookupReply{Tokens: 288}},
		namedReply{"ascend3_hit", LookupRequest{Form: FormAscend3}, LookupReply{Tokens: 0x01020304}},
		namedReply{"ascend4_hit", LookupRequest{Form: FormAscend4}, LookupReply{Tokens: math.MaxUint32}},
		namedReply{"ascend4_miss", LookupRequest{Form: FormAscend4}, LookupReply{}},
		namedReply{"simple_hit", LookupRequest{Form: FormSimple}, LookupReply{Blocks: 0x0102030405060708}},
		namedReply{"simple_miss", LookupRequest{Form: FormSimple}, LookupReply{}},
		namedReply{"malformed", LookupRequest{Form: FormMalformed}, LookupReply{Status: LookupMalformed}})
}
