package millstream.conformance.schemas;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.apicurio.registry.rules.compatibility.jsonschema.JsonSchemaDiffLibrary;
import io.apicurio.registry.rules.compatibility.protobuf.ProtobufCompatibilityCheckerLibrary;
import io.apicurio.registry.utils.protobuf.schema.ProtobufFile;
import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStreamWriter;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.SchemaCompatibility;

/**
 * Reads pairs of schemas, one JSON object a line with {@code type}, {@code reader} and {@code writer}, and writes
 * each with a line: why the reader cannot read what the writer wrote ({@code reasons}, empty if it can), or
 * {@code error} if the library takes one of the two for invalid.
 *
 * <p>The libraries below Apicurio's checkers are called directly, because the checkers leave out the reasons. For Avro
 * that is Avro's own Java library, which Confluent's registry uses, too.
 */
public final class Decide {
    private static final ObjectMapper JSON = new ObjectMapper();

    private Decide() {}

    public static void main(String[] arguments) throws IOException {
        try (var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
                var responses = new BufferedWriter(new OutputStreamWriter(System.out, StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                responses.write(JSON.writeValueAsString(response(JSON.readTree(line))));
                responses.newLine();
            }
        }
    }

    private static ObjectNode response(JsonNode pair) {
        ObjectNode response = JSON.createObjectNode();
        try {
            var reasons = response.putArray("reasons");
            String reader = pair.get("reader").asText();
            String writer = pair.get("writer").asText();
            for (String reason : decide(pair.get("type").asText(), reader, writer)) {
                reasons.add(reason);
            }
        } catch (RuntimeException | StackOverflowError invalid) {
            response.put("error", String.valueOf(invalid));
        }
        return response;
    }

    private static List<String> decide(String type, String reader, String writer) {
        switch (type) {
            case "AVRO":
                var result = SchemaCompatibility.checkReaderWriterCompatibility(
                        new Schema.Parser().parse(reader), new Schema.Parser().parse(writer));
                return result.getResult().getIncompatibilities().stream()
                        .map(found -> found.getType().name())
                        .toList();
            case "JSON":
                return JsonSchemaDiffLibrary.getIncompatibleDifferences(writer, reader, Map.of()).stream()
                        .map(found -> found.getDiffType().name())
                        .toList();
            case "PROTOBUF":
                var checker = new ProtobufCompatibilityCheckerLibrary(new ProtobufFile(writer), new ProtobufFile(reader));
                return checker.findDifferences().stream().map(found -> found.getMessage()).toList();
            default:
                throw new IllegalArgumentException("type " + type);
        }
    }
}
