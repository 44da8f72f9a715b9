package trace

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

const goodLine = `{"timestamp": 5, "hash_ids": [1, 2]}` + "\n"

// TestBadTracesAreRefused names the line and the field of what is wrong, and what it may be.
func TestBadTracesAreRefused(t *testing.T) {
	for _, c := range []struct{ trace, want string }{
		{goodLine + "{\n", "f:2: unexpected end"},
		{goodLine + "7\n", "f:2: the line is a number, must be an object"},
		{goodLine + `{"hash_ids": [1]}`, "f:2: timestamp is missing"},
		{goodLine + `{"timestamp": 7}`, "f:2: hash_ids is missing"},
		{goodLine + `{"timestamp": 7, "hash_ids": null}`, "f:2: hash_ids is missing"},
		{goodLine + `{"timestamp": -4, "hash_ids": [1]}`, "f:2: timestamp is -4, must be 0 to 9000000000000"},
		{goodLine + `{"timestamp": 9000000000001, "hash_ids": [1]}`,
			"f:2: timestamp is 9.000000000001e+12, must be 0 to 9000000000000"},
		{goodLine + `{"timestamp": 1e999, "hash_ids": [1]}`,
			"f:2: timestamp is a number 1e999, must be a number from 0 to 9000000000000"},
		{goodLine + `{"timestamp": "7", "hash_ids": [1]}`,
			"f:2: timestamp is a string, must be a number from 0 to 9000000000000"},
		{goodLine + "\n" + goodLine + `{"timestamp": 7, "hash_ids": [3, -1]}`,
			"f:4: hash_ids[1] is -1, must be an integer from 0 to 18446744073709551615"},
		{goodLine + `{"timestamp": 7, "hash_ids": [18446744073709551616]}`,
			"f:2: hash_ids[0] is 18446744073709551616, must be an integer"},
		{goodLine + `{"timestamp": 7, "hash_ids": [1.5]}`, "f:2: hash_ids[0] is 1.5, must be an integer"},
		{goodLine + `{"timestamp": 7, "hash_ids": [1, null]}`, "f:2: hash_ids[1] is null, must be an integer"},
		{goodLine + `{"timestamp": 7, "hash_ids": "1"}`, `f:2: hash_ids is "1", must be a list of integers`},
		{goodLine + `{"timestamp": 7, "hash_ids": "` + strings.Repeat("1", 100) + `"}`,
			`hash_ids is "111111111111111111111111111111111111111..., must be`},
		{goodLine + `{"timestamp": 7, "hash_ids": [0` + strings.Repeat(",0", MaxBlocks) + `]}`,
			"f:2: hash_ids has 1048577 numbers, must have at most 1048576"},
		{goodLine + strings.Repeat(" ", MaxLine+1), "f:2: the line is longer than 33554432 bytes"},
	} {
		if _, err := Parse(strings.NewReader(c.trace), "f", 0); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.200q: %v, want something with %q", c.trace, err, c.want)
		}
	}
}

// TestUnusualTracesAreRead has traces that are written otherwise than usual and say the same as a
// plain one, or what is expected.
func TestUnusualTracesAreRead(t *testing.T) {
	const last = `{"timestamp": 7, "hash_ids": [1, 3]}`
	plain := "5[1 2] 7[1 3]"
	for _, c := range []struct{ name, trace, want string }{
		{"plain", goodLine + last + "\n", plain},
		{"nothing", "", ""},
		{"no newline at the end", goodLine + last, plain},
		{"CRLF", strings.ReplaceAll(goodLine+last+"\n", "\n", "\r\n"), plain},
		{"empty lines", "\n" + goodLine + " \r\n" + last + "\n\n", plain},
		{"fractions of a ms", `{"timestamp": 5.75, "hash_ids": [1, 2]}` + "\n" +
			`{"timestamp": 7.0, "hash_ids": [1, 3]}`, "5.75[1 2] 7[1 3]"},
		{"a power of ten", `{"timestamp": 0.5e1, "hash_ids": [1, 2]}` + "\n" + last, plain},
		{"other fields", `{"chat_id": 3, "type": "text", "timestamp": 5, "turn": null, "hash_ids": [1, 2]}` + "\n" +
			last, plain},
		{"lengths that are none", `{"timestamp": 5, "input_length": "long", "output_length": [], "hash_ids": [1, 2]}` +
			"\n" + last, plain},
		{"not in order", last + "\n" + goodLine + `{"timestamp": 5, "hash_ids": [1]}`, "5[1 2] 5[1] 7[1 3]"},
		{"a request without blocks", goodLine + `{"timestamp": 6, "hash_ids": []}`, "5[1 2] 6[]"},
		{"hashes of 64 bits", `{"timestamp": 5, "hash_ids": [18446744073709551615]}`, "5[18446744073709551615]"},
	} {
		all, err := Parse(strings.NewReader(c.trace), "f", 0)
		var got []string
		for _, r := range all {
			got = append(got, fmt.Sprintf("%v%v", r.Timestamp, r.HashIDs))
		}
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, %v, want %v", c.name, got, err, c.want)
		}
	}
}

// TestTheFirstRequestsAreRead goes no further than asked, and knows the line of each.
func TestTheFirstRequestsAreRead(t *testing.T) {
	all, err := Parse(strings.NewReader("\n"+`{"timestamp": 7, "hash_ids": [1]}`+"\n"+goodLine+"{\n"), "f", 2)
	if err != nil || len(all) != 2 || all[0].Line != 3 || all[1].Line != 2 {
		t.Errorf("%v %v", all, err)
	}
}

func TestTokensAreCheckedWhenAskedFor(t *testing.T) {
	for _, c := range []struct {
		text string
		want int
		err  string
	}{
		{"", 9, ""}, {"null", 9, ""}, {"1", 1, ""}, {"20", 20, ""}, {"20.0", 20, ""}, {"2e1", 20, ""},
		{"0", 0, "n is 0, must be an integer from 1 to 20"}, {"21", 0, "n is 21, must be"},
		{"1.5", 0, "n is 1.5, must be"},
		{`"3"`, 0, `n is "3", must be`}, {"[]", 0, "n is [], must be"},
	} {
		got, err := Tokens{"n", c.text}.Within(1, 20, 9)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %d, %v; want %d, %q", c.text, got, err, c.want, c.err)
		}
	}
}

// FuzzParse expects the lines that were read to be in order and within their limits, whatever was
// written.
func FuzzParse(f *testing.F) {
	f.Add(goodLine + `{"timestamp": 3.5, "input_length": 5, "output_length": 1, "hash_ids": []}`)
	f.Fuzz(func(t *testing.T, text string) {
		all, err := Parse(strings.NewReader(text), "f", 0)
		if err != nil {
			return
		}
		again, err := Parse(strings.NewReader(text), "f", len(all))
		if err != nil || !reflect.DeepEqual(all, again) {
			t.Fatalf("the first %d are %v, %v, not all: %v", len(all), again, err, all)
		}
		for i := range all {
			if at := all[i].Timestamp; !(at >= 0 && at <= MaxMillis) || i > 0 && at < all[i-1].Timestamp ||
				all[i].HashIDs == nil {
				t.Fatalf("request %d is %+v", i, all[i])
			}
		}
	})
}
