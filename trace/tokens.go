package trace

import (
	"fmt"
	"math"
	"strconv"
)

// Tokens is a number of tokens as it was written. Nobody minds what it is before it is asked for: who reads only the blocks of a trace
// reads those without it too.
type Tokens struct{ field, text string }

// Within is the number; missing if it is not there. Another than an integer from least to most is an error.
func (t Tokens) Within(least, most, missing int) (int, error) {
	if t.text == "" || t.text == "null" {
		return missing, nil
	}
	n, err := strconv.ParseFloat(t.text, 64)
	if err != nil || n != math.Trunc(n) || n < float64(least) || n > float64(most) {
		return 0, fmt.Errorf("%s is %s, must be an integer from %d to %d", t.field, shown([]byte(t.text)), least, most)
	}
	return int(n), nil
}
